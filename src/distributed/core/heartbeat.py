"""The layout of a heartbeat file: one small record a rank that it overwrites in memory, and that anyone may read."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

RECORD = struct.Struct("<qq")  # optimizer steps done, monotonic nanoseconds of the last of them


@dataclass(frozen=True)
class Beat:
    step: int
    time_ns: int


def heartbeat_path(attempt_dir: str | os.PathLike[str], rank: int) -> Path:
    return Path(attempt_dir) / f"heartbeat-{rank}"


def read_beat(path: Path) -> Beat | None:
    """The last beat, or None when the rank has not begun."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    return Beat(*RECORD.unpack(raw[: RECORD.size])) if len(raw) >= RECORD.size else None
