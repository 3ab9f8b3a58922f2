"""The plain copy that a save is compared with, and the changes between saves, which decide how much is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def empty_like(tensors: Mapping[str, torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
    """Host memory for a copy of these, of which all pages are there."""
    made = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in tensors.values()]
    return [tensor.zero_() for tensor in made]


def copy_plainly(tensors: Mapping[str, torch.Tensor]) -> object:
    return [tensor.clone() for tensor in tensors.values()]


def copy_into(targets: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> object:
    """On a GPU, and into pinned memory, at the bus's speed."""
    for target, tensor in zip(targets, tensors.values(), strict=True):
        target.copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return targets


def change(tensors: Mapping[str, torch.Tensor], part: float) -> None:
    """The first tensors, up to that part of the elements.

    >>> tensors = {"a": torch.zeros(3), "b": torch.zeros(1, 7)}
    >>> change(tensors, 0.5)
    >>> tensors["a"].tolist(), tensors["b"].tolist()
    ([1.0, 1.0, 1.0], [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    """
    left = round(part * sum(tensor.numel() for tensor in tensors.values()))
    for tensor in tensors.values():
        count = min(left, tensor.numel())
        tensor.view(-1)[:count] += 1
        left -= count
