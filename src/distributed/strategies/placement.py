"""Layout: where the parts of each tensor of a model are, for a rank that does not hold all of them.

Tensor parallelism cuts a tensor along one dimension, where a rank may get several ranges (of a fused query, key and
value, say), which lie in its local tensor one after the other. Data-parallel sharding then cuts the rows of what is
left. A pipeline leaves whole tensors to other ranks. All of it is known by the names of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from distributed.runtime.portions import Box, Portion, whole_box
from distributed.strategies.gradient_sums import local


@dataclass(frozen=True)
class Cut:
    """The ranges of one dimension that this rank has, one after the other in its local tensor."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole tensor, in memory of its own.

        >>> Cut(0, ((0, 1), (2, 3))).take(torch.tensor([10, 20, 30, 40])).tolist()
        [10, 30]
        """
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)


@dataclass(frozen=True)
class _Whole:
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """Made of the whole model, before anything is cut; told of every cut."""

    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._whole = {name: _Whole(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}
        firsts: dict[int, str] = {}
        self._firsts = {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors}
        self._cuts: dict[str, Cut] = {}
        self._absent: set[str] = set()
        self._rows: dict[str, tuple[int, int]] = {}  # of the local tensor, where its rows are sharded
        self._stores: dict[str, bool] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole[name].shape

    def first_name(self, name: str) -> str:
        """Of the names of a tied tensor, the first."""
        return self._firsts[name]

    def cut(self, name: str, cut: Cut) -> None:
        """Of this tensor, this rank has only these ranges."""
        self._cuts[name] = cut

    def cut_of(self, name: str) -> Cut | None:
        return self._cuts.get(name)

    def leave_out(self, name: str) -> None:
        """This tensor is on other ranks."""
        self._absent.add(name)

    def is_here(self, name: str) -> bool:
        return name not in self._absent

    def shard_rows(self, name: str, rows: tuple[int, int]) -> None:
        """Of what this rank has of this tensor, it keeps only these rows."""
        self._rows[name] = rows

    def set_stores(self, name: str, stores: bool) -> None:
        """Whether this rank writes what it has of this tensor; by default it does."""
        self._stores[name] = stores

    def stores(self, name: str) -> bool:
        return self._stores.get(name, True)

    def is_sharded(self, name: str) -> bool:
        """Whether data ranks have different rows of it."""
        return name in self._rows

    def is_whole(self, name: str) -> bool:
        """Whether this rank, like every other, has all of it."""
        return name not in self._cuts and name not in self._rows and name not in self._absent

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The boxes of the whole tensor that are here."""
        return tuple(box for box, _ in self._places(name))

    def portion(self, name: str, tensor: torch.Tensor | None) -> Portion:
        """What this rank has of a tensor of this name and shape: the parameter itself, or its optimizer state."""
        whole = self._whole[name]
        if tensor is None:
            return Portion(whole.shape, whole.dtype, (), False)
        here = local(tensor)
        pieces = tuple((box, here[index]) for box, index in self._places(name))
        return Portion(whole.shape, here.dtype, pieces, self.stores(name))

    def take_portion(self, name: str, portion: Portion, tensor: torch.Tensor) -> None:
        """The elements of a portion with this layout's boxes, into the local tensor."""
        here = local(tensor)
        found = dict(portion.pieces)
        for box, index in self._places(name):
            here[index].copy_(found[box])

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's local tensor, before its rows are sharded, of the whole one."""
        cut = self._cuts.get(name)
        return whole if cut is None else cut.take(whole)

    def place(self, name: str, whole: torch.Tensor, target: torch.Tensor) -> None:
        """Of the whole tensor, what is here, into the local one."""
        here = local(target)
        taken = self.take(name, whole)
        here.copy_(taken[slice(*self._rows[name])] if name in self._rows else taken)

    def _places(self, name: str) -> list[tuple[Box, tuple[slice, ...]]]:
        """For each box that is here, where it lies in the local tensor."""
        if name in self._absent:
            return []
        return places(self._whole[name].shape, self._cuts.get(name), self._rows.get(name))

    def nbytes(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Of what these tensors hold on this rank."""
        return sum(self.portion(name, tensor).nbytes for name, tensor in tensors.items())


def places(
    shape: tuple[int, ...], cut: Cut | None, rows: tuple[int, int] | None
) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes of a tensor that was cut along one dimension and then by rows, and where each lies in what is left.

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
