"""Flat buffers: many tensors of any dtypes in one block of bytes, so that they are added and sent as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from distributed.runtime.torch_compat import foreach_add_, foreach_copy_, foreach_zero_

ALIGNMENT = 64  # bytes; of every tensor and every cut, so that any part can be viewed in its dtype


class _Section(NamedTuple):
    """A range of bytes that holds one dtype."""

    start: int
    stop: int
    dtype: torch.dtype


class FlatBlock:
    """One block and its tensors as views."""

    def __init__(self, block: torch.Tensor, sections: Sequence[_Section], places: Sequence[_Place]) -> None:
        self.bytes, self._sections = block, sections
        self._typed = [block[s.start : s.stop].view(s.dtype) for s in sections]
        self.views = [
            block[p.start : p.start + p.shape.numel() * p.dtype.itemsize].view(p.dtype).view(p.shape) for p in places
        ]

    def write(self, values: Sequence[torch.Tensor | None] | None) -> None:
        """Take these values; None is zeros."""
        if values is None:
            self.bytes.zero_()
            return
        views, given, missing = self._matched(values)
        if views:
            foreach_copy_(views, given)
        if missing:
            foreach_zero_(missing)

    def accumulate(self, values: Sequence[torch.Tensor | None] | None) -> None:
        """Add these values. A missing one is added as zero too: -0.0 + 0.0 is 0.0, here as in any other place."""
        if values is None:
            for section in self._typed:
                section.add_(0)
            return
        views, given, missing = self._matched(values)
        if views:
            foreach_add_(views, given)
        if missing:
            foreach_add_(missing, 0)

    def add(self, other: FlatBlock) -> None:
        for own, others in zip(self._typed, other._typed, strict=True):
            own.add_(others)

    def add_range(self, other: FlatBlock, start: int, stop: int) -> None:
        """Add the bytes from `start` to `stop`, both of them aligned, each in its dtype."""
        for section in self._sections:
            low, high = max(start, section.start), min(stop, section.stop)
            if low < high:
                self.bytes[low:high].view(section.dtype).add_(other.bytes[low:high].view(section.dtype))

    def _matched(
        self, values: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """The views that have a value, those values, and the views that have none."""
        pairs = [(view, value) for view, value in zip(self.views, values, strict=True) if value is not None]
        missing = [view for view, value in zip(self.views, values, strict=True) if value is None]
        return [view for view, _ in pairs], [value for _, value in pairs], missing


class _Place(NamedTuple):
    start: int
    shape: torch.Size
    dtype: torch.dtype


class FlatLayout:
    """Where each tensor lies. A function of shapes and dtypes alone, so it is the same on every rank and every day.

    >>> layout = FlatLayout([torch.zeros(3), torch.zeros((), dtype=torch.float64), torch.zeros(2, 2)])
    >>> layout.nbytes, [tuple(view.shape) for view in layout.new().views]
    (192, [(3,), (), (2, 2)])
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._device = like[0].device
        self._places: list[_Place] = [_Place(0, t.shape, t.dtype) for t in like]
        self._sections: list[_Section] = []
        end = 0
        for dtype in dict.fromkeys(tensor.dtype for tensor in like):
            start = end
            for index, place in enumerate(self._places):
                if place.dtype == dtype:
                    self._places[index] = place._replace(start=end)
                    end += align(place.shape.numel() * dtype.itemsize)
            self._sections.append(_Section(start, end, dtype))
        self.nbytes = end

    def new(self) -> FlatBlock:
        block = torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device)
        return FlatBlock(block, self._sections, self._places)


def align(count: int) -> int:
    """The next multiple of the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT
