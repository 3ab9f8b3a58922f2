"""MeshGroups: the process groups of a mesh's axes, for the rank that makes them. Every rank makes them at once."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed.core.mesh import MeshSpec

_DATA = ("dp_replicate", "dp_shard")


class MeshGroups:
    """Only axes of more than one rank have a group."""

    def __init__(self, spec: MeshSpec, rank: int, device_type: str, *, shards: bool = False) -> None:
        """`shards`: there is an axis dp_shard also if it has one rank, which then offloads to its host."""
        self.spec = spec
        self.place = spec.coordinates(rank)
        sizes = {axis: n for axis, n in spec.sizes().items() if n > 1 or (shards and axis == "dp_shard")}
        self._mesh: DeviceMesh | None = None
        self._made_world = bool(sizes) and not dist.is_initialized()  # a world of one
        if sizes:
            if self._made_world:
                backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self._mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Of the ranks that differ from this one on that axis alone; None where there are no others."""
        if self._mesh is None or self.spec.sizes()[axis] == 1:
            return None
        return self._mesh.get_group(axis)

    def close(self) -> None:
        if self._made_world and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def data(self) -> DeviceMesh:
        """Over which parameters are sharded: one axis, or two for hybrid sharding."""
        assert self._mesh is not None
        return self._mesh[_DATA if self.spec.dp_replicate > 1 else "dp_shard"]

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        """Those over which ranks see different samples."""
        return [group for axis in _DATA if (group := self.group(axis)) is not None]
