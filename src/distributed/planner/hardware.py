"""The hardware of this machine, found without importing torch and without opening a device."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES, engine_of
from distributed.core.env import visible_devices
from distributed.core.registry import load_target, require_installed


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int = 0
    compute_capability: float = 0.0  # 0: not known


@dataclass(frozen=True)
class Hardware:
    """The devices of one node."""

    gpus: tuple[Gpu, ...] = ()
    cpu_cores: int = 1
    memory_bytes: int = 0

    @property
    def has_bf16(self) -> bool:
        """Whether every GPU computes in bf16 natively (Ampere and later); every CPU that torch supports does."""
        return all(gpu.compute_capability >= 8.0 for gpu in self.gpus)


def capture_output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def probe_hardware(capture: Callable[[Sequence[str]], str] = capture_output) -> Hardware:
    """This node's GPUs as CUDA_VISIBLE_DEVICES leaves them, its usable cores and its memory."""
    listing = ""
    if shutil.which("nvidia-smi"):
        listing = capture(
            ["nvidia-smi", "--query-gpu=uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
        )
    return Hardware(
        gpus=_visible(_parse_gpus(listing), visible_devices()),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
    )


def probe_for(config: DistributedConfig) -> Hardware:
    """The hardware of a rank's node: this machine, or the largest node of the named cluster."""
    engine = engine_of(config)
    if config.address is not None and not engine.counts:  # of another engine's cluster
        engine = next((one for one in ENGINES.entries.values() if engine.models in one.places), engine)
    is_unsound = bool(engine.checks) and bool(load_target(engine.checks)(config))
    if config.address is None or not engine.counts or is_unsound:
        return probe_hardware()
    require_installed(engine, f"address={config.address!r}")
    gpus, cpus = load_target(engine.counts)(config.address)
    return Hardware((Gpu("GPU"),) * gpus, max(1, cpus))


def _parse_gpus(listing: str) -> dict[str, Gpu]:
    gpus: dict[str, Gpu] = {}
    for line in listing.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            uuid, name, memory_mib, capability = parts
            gpus[uuid] = Gpu(name, _number(memory_mib) * 2**20, float(capability) if _is_number(capability) else 0.0)
    return gpus


def _visible(gpus: dict[str, Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """CUDA's rule: a list of indices or UUID prefixes; the first unknown one hides the rest."""
    if visible is None:
        return tuple(gpus.values())
    chosen: list[Gpu] = []
    for part in (part.strip() for part in visible.split(",")):
        by_index = list(gpus.values())[int(part) : int(part) + 1] if part.isdigit() else []
        by_uuid = [gpu for uuid, gpu in gpus.items() if part and uuid.startswith(part)]
        if not (by_index or by_uuid):
            break
        chosen.append((by_index or by_uuid)[0])
    return tuple(chosen)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _number(text: str) -> int:
    return int(float(text)) if _is_number(text) else 0
