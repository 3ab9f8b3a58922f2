"""What one process has of the memory of its GPUs: written by a rank that ran out of it, or on request.

Torch is not imported here: a process that has not done so has nothing to report.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed.core.atomic import write_private

_ERRORS = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error|cuda\w* failure|AcceleratorError", re.IGNORECASE)


@dataclass(frozen=True)
class GpuMemory:
    """Bytes; `allocated` are in tensors, `reserved` are held for them. What others have is in neither."""

    rank: int
    pid: int
    gpu: str  # which one of the machine's, by a name that no other has
    name: str
    total: int
    free: int  # -1: not known
    allocated: int
    reserved: int
    peak: int  # of `allocated`


def is_of_gpu(kind: str, message: str) -> bool:
    """Whether an error, by its type's name and its text, is of a GPU: of its memory, or of what runs on it.

    >>> is_of_gpu("RuntimeError", "CUDA error: an illegal memory access was encountered")
    True
    >>> is_of_gpu("ValueError", "shapes differ")
    False
    """
    return bool(_ERRORS.search(kind) or _ERRORS.search(message))


def write_memory(path: Path, rank: int, *, with_picture: bool = False) -> None:
    """Of the GPUs on which this process holds memory; with a picture beside it, for https://pytorch.org/memory_viz."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    shares = [_of_device(torch, device, rank) for device in range(torch.cuda.device_count())]
    write_private(path, json.dumps([asdict(share) for share in shares if share is not None]))
    if with_picture:
        with suppress(Exception):  # it is made of a process that has failed already
            path.with_suffix(".txt").write_text(torch.cuda.memory_summary(), encoding="utf-8")
        with suppress(Exception):
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))


def read_memory(path: Path) -> list[GpuMemory]:
    """Empty where nothing is there."""
    try:
        return [GpuMemory(**gpu) for gpu in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def _of_device(torch: Any, device: int, rank: int) -> GpuMemory | None:
    stats = torch.cuda.memory_stats(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    if not reserved:
        return None
    properties = torch.cuda.get_device_properties(device)
    free = -1
    with suppress(RuntimeError):  # of a device on which something has gone wrong
        free = torch.cuda.mem_get_info(device)[0]
    return GpuMemory(
        rank=rank,
        pid=os.getpid(),
        gpu=str(getattr(properties, "uuid", device)),
        name=properties.name,
        total=properties.total_memory,
        free=free,
        allocated=stats.get("allocated_bytes.all.current", 0),
        reserved=reserved,
        peak=stats.get("allocated_bytes.all.peak", 0),
    )
