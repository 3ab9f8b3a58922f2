"""ComputeClock: the time of a rank's own work in a step, until it begins to wait for other ranks.

A host's clock does not show the work of a GPU. There, a pair of CUDA events is recorded at steps that are measured
anyway, and read when the next such step begins, so that nothing synchronizes.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple, Protocol

import torch


class ReductionTime(NamedTuple):
    """Of one rank and step."""

    alone_s: float  # of the buckets, sent by themselves: on the slowest rank
    exposed_s: float  # from the last gradient of the backward pass to the last sum of all ranks
    backward_s: float  # from its beginning to the last gradient


class TimedReduction(Protocol):
    """Of gradients over all ranks; every rank makes every call."""

    def begin(self, measure: bool) -> None:
        """Before a step; `measure`: it is to be timed."""

    def take(self) -> ReductionTime | None:
        """Of the step that has just ended; None: it was not timed."""


class ComputeClock:
    """A strategy calls `begin` when a step begins and `mark` before each backward pass; the last mark counts.

    The last backward pass reduces gradients while it runs, so it takes equally long on every rank: only the time
    before it can be compared.
    """

    reduction: TimedReduction | None = None  # of the backward pass, where DDP reduces gradients over all ranks

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0  # of the host, over all steps
        self.device_seconds = None if device.type == "cpu" else 0.0  # of the measured step before the last; 0: none yet
        self.was_idle = True  # whether the device had nothing to do when the last measured step began
        self._last = 0.0
        self._device = None if device.type == "cpu" else device
        self._records = self._is_recorded = False
        if self._device is not None:
            self._begun, self._marked = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self, measure: bool) -> None:
        if self.reduction is not None:
            self.reduction.begin(measure)
        if self._device is not None:
            self._records = measure
            if measure:
                self._begin_on_device(self._device)
        self._last = perf_counter()

    def mark(self) -> None:
        now = perf_counter()
        self.seconds += now - self._last
        self._last = now
        if self._records:
            self._marked.record()
            self._is_recorded = True

    def _begin_on_device(self, device: torch.device) -> None:
        self.was_idle = torch.cuda.current_stream(device).query()
        if self._is_recorded and self._marked.query():
            self.device_seconds = self._begun.elapsed_time(self._marked) / 1e3
        self._is_recorded = False
        self._begun.record()
