"""Messages between a parameter server and its workers: some numbers, and tensors of any types, as bytes in one tensor.

Nothing in a message is code, and nothing of it is unpickled: both sides know its layout from their own model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Work = Any  # a torch.distributed.Work
_ALIGNED = 16  # bytes at which each tensor begins, so that any type can be viewed there


class TensorMessage:
    """The memory of one message, on the host, and its parts."""

    def __init__(self, like: Sequence[torch.Tensor], numbers: int, *, pinned: bool) -> None:
        sizes = [_round_up(8 * numbers), _round_up(len(like)), *(_round_up(t.numel() * t.itemsize) for t in like)]
        self.bytes = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        parts = torch.split(self.bytes, sizes)
        self.numbers = parts[0][: 8 * numbers].view(torch.float64)
        self.is_there = parts[1][: len(like)]  # of each tensor, whether the sender has it
        self.tensors = [
            part[: t.numel() * t.itemsize].view(t.dtype).view(t.shape) for part, t in zip(parts[2:], like, strict=True)
        ]

    @torch.no_grad()
    def fill(self, numbers: Sequence[float], tensors: Sequence[torch.Tensor | None]) -> None:
        """Take a copy of what is to be sent."""
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        self.is_there.copy_(torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8))
        for own, tensor in zip(self.tensors, tensors, strict=True):
            if tensor is not None:
                own.copy_(tensor)

    def read(self) -> tuple[list[float], list[torch.Tensor | None]]:
        """What was received; the tensors are this message's memory."""
        there: list[int] = self.is_there.tolist()
        found = [tensor if is_there else None for tensor, is_there in zip(self.tensors, there, strict=True)]
        numbers: list[float] = self.numbers.tolist()
        return numbers, found


class MessageLayout:
    """What both sides know of a message before it is sent.

    >>> layout = MessageLayout([torch.zeros(2), torch.zeros(3, dtype=torch.float64)], numbers=1)
    >>> message = layout.make()
    >>> message.fill([7.0], [torch.ones(2), None])
    >>> message.read()
    ([7.0], [tensor([1., 1.]), None])
    """

    def __init__(self, like: Sequence[torch.Tensor], *, numbers: int) -> None:
        self._like, self._numbers = [torch.empty_like(t, device="meta") for t in like], numbers
        self._pinned = any(t.device.type == "cuda" for t in like)

    def make(self) -> TensorMessage:
        return TensorMessage(self._like, self._numbers, pinned=self._pinned)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
