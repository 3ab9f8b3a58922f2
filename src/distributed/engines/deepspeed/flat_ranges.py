"""Ranges of a flattened tensor as boxes of the tensor: how ZeRO cuts, in the words in which checkpoints are stored."""

from __future__ import annotations

import math

import torch

from distributed.runtime.tensor_shard import Box, TensorShard, box_size, overlap, whole_box, within


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that make up the elements from `start` to `stop` of a tensor that is laid out row by row, in order.

    There are at most two for each dimension, less one: rows that are cut, and those in between.

    >>> range_boxes((4, 3), 2, 10)
    (((0, 1), (2, 3)), ((1, 3), (0, 3)), ((3, 4), (0, 1)))
    >>> range_boxes((4, 3), 0, 12)
    (((0, 4), (0, 3)),)
    """
    if start >= stop:
        return ()
    if not shape:
        return ((),)
    rest = shape[1:]
    size = math.prod(rest)
    (first, head), (last, tail) = divmod(start, size), divmod(stop, size)
    if first == last:
        return tuple(((first, first + 1), *box) for box in range_boxes(rest, head, tail))
    found: list[Box] = []
    if head:
        found += [((first, first + 1), *box) for box in range_boxes(rest, head, size)]
        first += 1
    if first < last:
        found.append(((first, last), *whole_box(rest)))
    if tail:
        found += [((last, last + 1), *box) for box in range_boxes(rest, 0, tail)]
    return tuple(found)


def range_shard(shape: tuple[int, ...], start: int, elements: torch.Tensor) -> TensorShard:
    """The range that begins at `start` and has these elements, which the shard shows without copying them.

    >>> [tensor.tolist() for _, tensor in range_shard((2, 2), 1, torch.arange(3)).pieces]
    [[[0]], [[1, 2]]]
    """
    pieces, offset = [], 0
    for box in range_boxes(shape, start, start + elements.numel()):
        size = box_size(box)
        pieces.append((box, elements[offset : offset + size].view([stop - begin for begin, stop in box])))
        offset += size
    return TensorShard(shape, elements.dtype, tuple(pieces))


@torch.no_grad()
def fill_range(target: torch.Tensor, start: int, value: torch.Tensor | TensorShard) -> None:
    """Put the range that begins at `start` of a whole tensor, or of what is here of one, into a flat tensor."""
    if isinstance(value, torch.Tensor):
        target.copy_(value.reshape(-1)[start : start + target.numel()])
        return
    filled = 0
    for box, view in range_shard(value.shape, start, target).pieces:
        for held, tensor in value.pieces:
            common = overlap(box, held)
            if common is not None:
                view[within(common, box)].copy_(tensor[within(common, held)])
                filled += box_size(common)
    assert filled == target.numel(), f"{filled} of {target.numel()} elements are here"
