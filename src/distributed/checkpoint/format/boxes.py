"""Boxes of a tensor: whether they make up the whole, and which of them a stored run of bytes belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed.runtime.tensor_shard import Box, box_size, overlap, whole_box, within

MAX_BOXES = 4096  # of one tensor
MAX_DIMS = 31  # of a tensor in boxes: an old numpy has 32, and one is for the bytes of an element


def box_shape(box: Box) -> tuple[int, ...]:
    """
    >>> box_shape(((2, 4), (0, 3)))
    (2, 3)
    """
    return tuple(stop - start for start, stop in box)


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape has such a box, which may be empty."""
    if len(box) != len(shape) or len(shape) > MAX_DIMS:
        return False
    return all(0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=True))


def find_fault(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Empty when every element is in exactly one of these boxes, which fit; else what is wrong.

    >>> find_fault([((0, 2), (0, 3)), ((2, 4), (0, 3))], (4, 3))
    ''
    >>> find_fault([((0, 2), (0, 3)), ((1, 4), (0, 3))], (4, 3))
    '[0:2, 0:3] and [1:4, 0:3] overlap'
    """
    if len(boxes) > MAX_BOXES:
        return f"it is in {len(boxes)} boxes, and {MAX_BOXES} are the most"
    pair = _find_overlap(boxes)
    if pair is not None:
        return f"{_say(pair[0])} and {_say(pair[1])} overlap"
    held, all_of_it = sum(map(box_size, boxes)), math.prod(shape)
    return f"{all_of_it - held} of its {all_of_it} elements are in no box" if held != all_of_it else ""


def slabs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """A run of a tensor's elements in row-major order, as boxes that follow each other in it.

    >>> list(slabs((4, 3), 2, 10))
    [((0, 1), (2, 3)), ((1, 3), (0, 3)), ((3, 4), (0, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = shape[1:]
    row = math.prod(inner)
    head, tail = -(-start // row), stop // row  # the whole rows
    if head > tail:
        yield from _in_row(inner, tail, start - tail * row, stop - tail * row)
        return
    if start < head * row:
        yield from _in_row(inner, head - 1, start - (head - 1) * row, row)
    if head < tail:
        yield ((head, tail), *whole_box(inner))
    if tail * row < stop:
        yield from _in_row(inner, tail, 0, stop - tail * row)


@dataclass(frozen=True)
class Target:
    """A box and the memory for it: its shape, and one dimension more for the bytes of an element."""

    box: Box
    memory: np.ndarray[Any, Any]

    @staticmethod
    def of(box: Box, flat: np.ndarray[Any, Any], itemsize: int) -> Target:
        return Target(box, flat.reshape(*box_shape(box), itemsize))


def touches(outer: Box, start: int, stop: int, boxes: Sequence[Box]) -> bool:
    """Whether any of a run of the elements of the box `outer` is in one of these boxes."""
    return any(
        overlap(_shift(slab, outer), box) is not None for slab in slabs(box_shape(outer), start, stop) for box in boxes
    )


def scatter(data: np.ndarray[Any, Any], outer: Box, start: int, targets: Sequence[Target]) -> None:
    """Copy the bytes of a run of elements of the box `outer`, from the one at `start` on, to wherever they belong."""
    itemsize, at = targets[0].memory.shape[-1], 0
    if len(targets) == 1 and targets[0].box == outer:  # of which the run is a run too
        targets[0].memory.reshape(-1)[start * itemsize : start * itemsize + len(data)] = data
        return
    for slab in slabs(box_shape(outer), start, start + len(data) // itemsize):
        size, place = box_size(slab) * itemsize, _shift(slab, outer)
        source = data[at : at + size].reshape(*box_shape(slab), itemsize)
        for target in targets:
            common = overlap(place, target.box)
            if common is not None:
                target.memory[within(common, target.box)] = source[within(common, place)]
        at += size


def _in_row(inner: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in slabs(inner, start, stop):
        yield ((row, row + 1), *box)


def _shift(box: Box, outer: Box) -> Box:
    """Where a box of what `outer` holds is in the whole tensor."""
    return tuple((start + at, stop + at) for (start, stop), (at, _) in zip(box, outer, strict=True))


def _find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Along the dimension in which most boxes begin apart, only those that are open there need to be compared."""
    if len(boxes) < 2:
        return None
    dim = max(range(len(boxes[0])), key=lambda d: len({box[d][0] for box in boxes}), default=None)
    if dim is None:
        return boxes[0], boxes[1]
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        near = [other for other in near if other[dim][1] > box[dim][0]]
        for other in near:
            if overlap(other, box) is not None:
                return other, box
        near.append(box)
    return None


def _say(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
