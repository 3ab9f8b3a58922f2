"""The machine and the versions behind a number, in words that name no host and no path."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from distributed.planner.hardware import probe_hardware

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, by a part of the GPU's name
_PACKAGES = (
    "distributed-training",
    "torch",
    "numpy",
    "tensorboard",
    "lightning",
    "accelerate",
    "deepspeed",
    "horovod",
    "ray",
    "optuna",
    "tensorflow",
    "tensorflow-cpu",
)


def describe_machine() -> dict[str, Any]:
    hardware = probe_hardware()
    return {
        "cpu": _cpu_model(),
        "cores": hardware.cpu_cores,
        "memory_gib": round(hardware.memory_bytes / 2**30, 1),
        "gpus": [gpu.name for gpu in hardware.gpus],
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Python's, and those of the packages here that matter to a timing."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def load_average() -> float | None:
    """Processes that wanted a core in the last minute; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"
