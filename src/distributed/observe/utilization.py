"""How busy the device is, in percent, read cheaply enough to be asked at every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module

import psutil

from distributed.core.env import visible_devices

INTERVAL_S = 1.0  # between two readings; in between the last one is returned
FIRST_INTERVAL_S = 0.1  # psutil's shortest meaningful interval, so that short runs get a reading too


class UtilizationSampler:
    """Percent of the machine's CPU time, or of one GPU's, since about a second ago; None is unknown.

    `index` counts the devices that this process may see. A GPU is read through NVML, when its bindings (the module
    `pynvml`) are installed.
    """

    def __init__(self, device: str, index: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read = _cpu_reader() if device == "cpu" else _gpu_reader(index, visible_devices())
        self._last: float | None = None
        self._next_reading = clock() + FIRST_INTERVAL_S

    def percent(self) -> float | None:
        if self._read is not None and self._clock() >= self._next_reading:
            self._next_reading = self._clock() + INTERVAL_S
            self._last = self._read()
        return self._last


Reader = Callable[[], float | None]


def _cpu_reader() -> Reader:
    psutil.cpu_percent(interval=None)  # each reading is of the time since the one before
    return lambda: psutil.cpu_percent(interval=None)


def _gpu_reader(index: int, visible: str | None) -> Reader | None:
    """Reads one GPU, or None when it cannot be known: no NVML, or a device that it cannot name."""
    name = _nvml_name(index, visible)
    try:
        nvml = import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        nvml.nvmlInit()
        by_name = nvml.nvmlDeviceGetHandleByIndex if isinstance(name, int) else nvml.nvmlDeviceGetHandleByUUID
        handle = by_name(name)
    except nvml.NVMLError:
        return None

    def read() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except nvml.NVMLError:  # MIG slices have no utilization of their own
            return None

    return read


def _nvml_name(index: int, visible: str | None) -> int | str:
    """NVML counts all devices, CUDA only those in CUDA_VISIBLE_DEVICES, which names them by number or UUID.

    >>> _nvml_name(1, None), _nvml_name(1, "4,6"), _nvml_name(0, "GPU-58f24916"), _nvml_name(0, "")
    (1, 6, 'GPU-58f24916', 'none')
    """
    if visible is None:
        return index
    names = [name.strip() for name in visible.split(",") if name.strip()]
    name = names[index] if index < len(names) else "none"
    return int(name) if name.isdigit() else name
