"""MeshGroups: the process groups of a mesh's axes for this rank; all ranks must make them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed.core.mesh import MeshSpec

_DATA = ("dp_replicate", "dp_shard")


class MeshGroups:
    """The process groups of the axes with more than one rank."""

    def __init__(self, spec: MeshSpec, rank: int, device_type: str, *, shards: bool = False) -> None:
        """`shards`: keep the axis dp_shard even with one rank, which then offloads to its host."""
        self.spec = spec
        self.place = spec.coordinates(rank)
        sizes = {axis: n for axis, n in spec.sizes().items() if n > 1 or (shards and axis == "dp_shard")}
        self._mesh: DeviceMesh | None = None
        self._made_world = bool(sizes) and not dist.is_initialized()  # a world of one
        if sizes:
            if self._made_world:
                backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self._mesh = init_device_mesh(
                device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=_backends(sizes)
            )

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of the ranks that differ from this one on that axis only; None without others."""
        if self._mesh is None or self.spec.sizes()[axis] == 1:
            return None
        return self._mesh.get_group(axis)

    def close(self) -> None:
        if self._made_world and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def data(self) -> DeviceMesh:
        """The mesh over which parameters are sharded: one axis, or two for hybrid sharding."""
        assert self._mesh is not None
        return self._mesh[_DATA if self.spec.dp_replicate > 1 else "dp_shard"]

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        """The groups over which ranks have different samples."""
        return [group for axis in _DATA if (group := self.group(axis)) is not None]


def _backends(sizes: Mapping[str, int]) -> dict[int | str, Any] | None:
    """The backend of the axes' groups if a world has both gloo and NCCL; None: torch's choice.

    Torch would split the world's group and pass NCCL's options to gloo, which warns about them on every axis.
    An axis of all ranks uses the world's own group.
    """
    world = dist.get_backend_config()
    if "gloo" not in world or "nccl" not in world:
        return None
    return {axis: world for axis, size in sizes.items() if size < dist.get_world_size()} or None
