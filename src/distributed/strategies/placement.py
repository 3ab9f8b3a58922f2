"""Layout: the shards of each tensor of a model on a rank that does not hold all of them.

Tensor parallelism cuts a tensor along one dimension, where a rank may get several ranges (of a fused query, key and
value, say), which are contiguous in its local tensor. Data-parallel sharding then cuts the rows of the local tensor. A
pipeline places whole tensors on other ranks. All of this is recorded by the names of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from distributed.runtime.tensor_shard import Box, TensorShard, whole_box
from distributed.runtime.tensor_shard import local as local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # takes long to import


@dataclass(frozen=True)
class Cut:
    """The ranges of one dimension on this rank, concatenated in its local tensor."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the whole tensor, as a copy.

        >>> Cut(0, ((0, 1), (2, 3))).take(torch.tensor([10, 20, 30, 40])).tolist()
        [10, 30]
        """
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)


@dataclass(frozen=True)
class _Whole:
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """The layout of a model: made before anything is cut, it records every cut."""

    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._whole = {name: _Whole(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}
        firsts: dict[int, str] = {}
        self._firsts = {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors}
        self._cuts: dict[str, Cut] = {}
        self._absent: set[str] = set()
        self._rows: dict[str, tuple[int, int]] = {}  # of the local tensor, where its rows are sharded
        self._stores: dict[str, bool] = {}
        self._found: dict[str, list[tuple[Box, tuple[slice, ...]]]] = {}  # the places of each, once they were asked for

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole[name].shape

    def first_name(self, name: str) -> str:
        """The first of a tied tensor's names."""
        return self._firsts[name]

    def cut(self, name: str, cut: Cut) -> None:
        """Record that this rank has only these ranges of a tensor."""
        self._cuts[name] = cut
        self._found.clear()

    def cut_of(self, name: str) -> Cut | None:
        return self._cuts.get(name)

    def add_elsewhere(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Record a tensor of the whole model that was never on this rank."""
        self._whole[name], self._firsts[name] = _Whole(shape, dtype), name
        self._absent.add(name)
        self._found.clear()

    def leave_out(self, name: str) -> None:
        """Record that a tensor is on other ranks only."""
        self._absent.add(name)
        self._found.clear()

    def is_here(self, name: str) -> bool:
        return name not in self._absent

    def shard_rows(self, name: str, rows: tuple[int, int]) -> None:
        """Record that this rank keeps only these rows of its local tensor."""
        self._rows[name] = rows
        self._found.clear()

    def set_stores(self, name: str, stores: bool) -> None:
        """Record whether this rank saves its shard of a tensor; by default it does."""
        self._stores[name] = stores

    def stores(self, name: str) -> bool:
        return self._stores.get(name, True)

    def is_sharded(self, name: str) -> bool:
        """Whether the rows of a tensor are sharded over data-parallel ranks."""
        return name in self._rows

    def is_whole(self, name: str) -> bool:
        """Whether every rank has the whole tensor."""
        return name not in self._cuts and name not in self._rows and name not in self._absent

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The boxes of the whole tensor on this rank."""
        return tuple(box for box, _ in self._places(name))

    def shard(self, name: str, tensor: torch.Tensor | None) -> TensorShard:
        """This rank's shard of a tensor of this name and shape: the parameter, or its optimizer state."""
        whole = self._whole[name]
        if tensor is None:
            return TensorShard(whole.shape, whole.dtype, (), False)
        here, found = local(tensor), self._places(name)
        if len(found) == 1 and [stop - start for start, stop in found[0][0]] == [*here.shape]:  # all is in one box
            pieces: tuple[tuple[Box, torch.Tensor], ...] = ((found[0][0], here),)
        else:
            pieces = tuple((box, here[index]) for box, index in found)
        return TensorShard(whole.shape, here.dtype, pieces, self.stores(name))

    def take_shard(self, name: str, shard: TensorShard, tensor: torch.Tensor) -> None:
        """Copy a shard with this layout's boxes into the local tensor."""
        here = local(tensor)
        found = dict(shard.pieces)
        for box, index in self._places(name):
            here[index].copy_(found[box])

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's local tensor of the whole one, before its rows are sharded."""
        cut = self._cuts.get(name)
        return whole if cut is None else cut.take(whole)

    def place(self, name: str, whole: torch.Tensor, target: torch.Tensor) -> None:
        """Copy this rank's part of the whole tensor into the local one."""
        here = local(target)
        taken = self.take(name, whole)
        here.copy_(taken[slice(*self._rows[name])] if name in self._rows else taken)

    def _places(self, name: str) -> list[tuple[Box, tuple[slice, ...]]]:
        """The place of each local box in the local tensor."""
        if name in self._absent:
            return []
        if name not in self._found:
            self._found[name] = places(self._whole[name].shape, self._cuts.get(name), self._rows.get(name))
        return self._found[name]

    def nbytes(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """The bytes of these tensors on this rank."""
        return sum(self.shard(name, tensor).nbytes for name, tensor in tensors.items())


def places(
    shape: tuple[int, ...], cut: Cut | None, rows: tuple[int, int] | None
) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes of a tensor that was cut along one dimension and then by rows, and their places in the local tensor.

    >>> places((8,), Cut(0, ((0, 2), (4, 6))), (1, 3))
    [(((1, 2),), (slice(0, 1, None),)), (((4, 5),), (slice(1, 2, None),))]
    """
    if not shape:
        return [((), ())]
    found = []
    ranges = whole_box(shape) if cut is None else (*whole_box(shape)[: cut.dim], None, *whole_box(shape)[cut.dim + 1 :])
    dim = 0 if cut is None else cut.dim
    low, high = rows if rows is not None else (0, shape[0] if cut is None or cut.dim else cut.length)
    offset = 0
    for start, stop in (whole_box(shape)[0],) if cut is None else cut.ranges:
        length = stop - start
        if dim == 0:  # the rows are counted in the local tensor
            first, last = max(low, offset), min(high, offset + length)
            if first < last:
                box = ((start + first - offset, start + last - offset), *ranges[1:])
                local = slice(first - low, last - low)
                found.append((box, (local, *(slice(0, size) for size in shape[1:]))))
        elif low < high and length:
            box = tuple(
                (low, high) if at == 0 else (start, stop) if at == dim else pair for at, pair in enumerate(ranges)
            )
            index = tuple(
                slice(0, high - low) if at == 0 else slice(offset, offset + length) if at == dim else slice(0, size)
                for at, size in enumerate(shape)
            )
            found.append((box, index))
        offset += length
    return [(box, index) for box, index in found if all(start < stop for start, stop in box)]  # type: ignore[misc]


def rows_of(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows of a rank, as `torch.chunk` cuts them: the last ranks may have fewer, or none.

    >>> [rows_of(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-length // ranks)
    return min(rank * size, length), min((rank + 1) * size, length)


def rows_here(parameter: DTensor) -> tuple[int, int]:
    """This rank's rows of a sharded parameter."""
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    return rows_of(parameter.shape[0], mesh.get_local_rank(axis), mesh.size(axis))
