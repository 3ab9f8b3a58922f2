"""Diff: what two checkpoints do not have in common, by name; only tensors whose digests differ are read.

The same bytes have two digests where they were cut into other boxes: then they are read, and found to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from distributed.checkpoint.exchange.catalog import Opened
from distributed.checkpoint.exchange.named_tensors import Leaf, TensorReader, leaf_tree, walk
from distributed.checkpoint.format.manifest import Manifest
from distributed.checkpoint.format.tensors import as_bytes
from distributed.checkpoint.restore.fetching import Progress

_SLICE = 2**20  # elements that are compared at once


@dataclass(frozen=True)
class TensorDiff:
    """How the values of a tensor differ."""

    name: str
    elements: int
    differing: int  # elements; 0 where only the bytes differ, as 0.0 and -0.0 do
    largest: float  # absolute difference; nan where one of the two is not a number


@dataclass(frozen=True)
class Difference:
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    reshaped: tuple[tuple[str, str, str], ...]  # name, what it is in a, in b
    changed: tuple[TensorDiff, ...]
    scalars: tuple[tuple[str, Any, Any], ...]  # name, a, b
    equal: int  # tensors
    shared_bytes: int  # in chunks that both have
    bytes_a: int
    bytes_b: int

    @property
    def is_empty(self) -> bool:
        return not (self.only_a or self.only_b or self.reshaped or self.changed or self.scalars)


def compare(a: Opened, b: Opened, *, progress: Progress = lambda done, total: None) -> Difference:
    """Names, types and shapes, values and scalars, of what all ranks share and of each rank's own."""
    in_a, in_b = _everything(a.manifest), _everything(b.manifest)
    both = [name for name in in_a if name in in_b]
    tensors = [(n, in_a[n], in_b[n]) for n in both if isinstance(in_a[n], Leaf) and isinstance(in_b[n], Leaf)]
    reshaped = [(n, _kind(in_a[n]), _kind(in_b[n])) for n in both if _kind(in_a[n]) != _kind(in_b[n])]
    alike = [(n, x, y) for n, x, y in tensors if _kind(x) == _kind(y)]
    scalars = [n for n in both if not isinstance(in_a[n], Leaf) and not isinstance(in_b[n], Leaf)]
    differing = [(n, x, y) for n, x, y in alike if x.entry.digest != y.entry.digest]
    total, done = sum(x.entry.nbytes for _, x, _ in differing), 0
    readers = TensorReader(a.storage, a.manifest), TensorReader(b.storage, b.manifest)
    changed = []
    for name, one, other in differing:
        found = compare_runs(name, zip(readers[0].runs(one), readers[1].runs(other), strict=True))
        if found is not None:
            changed.append(found)
        done += one.entry.nbytes
        progress(done, total)
    common = a.manifest.chunks.keys() & b.manifest.chunks.keys()
    return Difference(
        only_a=tuple(name for name in in_a if name not in in_b),
        only_b=tuple(name for name in in_b if name not in in_a),
        reshaped=tuple(reshaped),
        changed=tuple(changed),
        scalars=tuple((n, in_a[n], in_b[n]) for n in scalars if not _same(in_a[n], in_b[n])),
        equal=len(alike) - len(changed),
        shared_bytes=sum(a.manifest.chunks[digest] for digest in common),
        bytes_a=sum(a.manifest.chunks.values()),
        bytes_b=sum(b.manifest.chunks.values()),
    )


def compare_tensors(name: str, one: torch.Tensor, other: torch.Tensor) -> TensorDiff | None:
    """None for equal bytes.

    >>> compare_tensors("w", torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.0]))
    TensorDiff(name='w', elements=3, differing=1, largest=0.5)
    """
    return compare_runs(name, [(one, other)])


def compare_runs(name: str, runs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> TensorDiff | None:
    """The same of a tensor that comes in runs of its elements."""
    is_same, elements, count, largest = True, 0, 0, 0.0
    for one, other in runs:
        elements += one.numel()
        if torch.equal(as_bytes(one), as_bytes(other)):
            continue
        is_same, wide = False, torch.complex128 if one.is_complex() else torch.float64
        for x, y in zip(one.reshape(-1).split(_SLICE), other.reshape(-1).split(_SLICE), strict=True):
            integral = not (x.is_floating_point() or x.is_complex())
            u, v = x.to(wide), y.to(wide)
            unequal = x.view(_bits(x)) != y.view(_bits(y)) if integral else (u != v) & ~(u.isnan() & v.isnan())
            if found := int(unequal.sum()):
                count += found
                worst = float((u[unequal] - v[unequal]).abs().max())  # a nan is the maximum
                largest = math.nan if math.isnan(worst + largest) else max(largest, worst)
    return None if is_same else TensorDiff(name, elements, count, largest)


def _bits(tensor: torch.Tensor) -> torch.dtype:
    """A signed type of the same width: torch compares few of the unsigned ones."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _everything(manifest: Manifest) -> dict[str, Any]:
    found = dict(walk(leaf_tree(manifest.shared)))
    for rank, part in enumerate(manifest.own):
        found |= walk(leaf_tree(part), f"rank-{rank}")
    return found


def _kind(value: Any) -> str:
    return f"{value.entry.dtype} {list(value.entry.shape)}" if isinstance(value, Leaf) else "not a tensor"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
