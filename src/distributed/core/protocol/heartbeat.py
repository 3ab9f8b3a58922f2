"""The layout of a heartbeat file: one small record a rank that it overwrites in memory, and that anyone may read."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Phase(IntEnum):
    """What a rank is doing. Only a step has a deadline: how long the others take is not known beforehand."""

    STARTING = 0  # also the first steps, in which kernels are compiled and caches are filled
    TRAINING = 1
    EVALUATING = 2
    SAVING = 3
    ENDED = 4


# steps done, monotonic ns of the last sign of life, phase, slowest recent step in ns, name of the collective it is in
RECORD = struct.Struct("<qqqq48s")


@dataclass(frozen=True)
class Beat:
    step: int
    time_ns: int
    phase: Phase = Phase.STARTING
    slowest_ns: int = 0
    collective: str = ""


def read_beat(path: Path) -> Beat | None:
    """The last beat, or None when the rank has not begun."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < RECORD.size:
        return None
    step, time_ns, phase, slowest_ns, collective = RECORD.unpack(raw[: RECORD.size])
    return Beat(step, time_ns, Phase(phase), slowest_ns, collective.rstrip(b"\0").decode(errors="replace"))
