"""What a captured step could gain: the time in which the host launches a step, and that of the device after it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from distributed.strategies.base import StepOutput

_BUSY = 0.25  # of the host's time that the device may run longer: more, and there is nothing to gain


class LaunchTimes:
    """Of the first steps of a run, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: list[tuple[float, float]] = []  # (seconds of the host, seconds that the device took after it)

    def timed(self, step: Callable[[], StepOutput]) -> StepOutput:
        torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        output = step()
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        self._waits.append((launched - begun, time.perf_counter() - launched))
        return output

    @property
    def nothing_to_gain(self) -> str:
        """Why the device is what takes the time of a step; "": the host does."""
        host, after = min(self._waits, default=(1.0, 0.0))
        if after <= _BUSY * host:
            return ""
        return f"the device computes for {1e3 * after:.1f} ms after the host has launched all in {1e3 * host:.1f} ms"
