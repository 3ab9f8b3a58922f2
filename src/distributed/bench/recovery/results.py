"""What `distributed bench recovery` found, and the limits that we hold ourselves to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from distributed.bench.machine import describe_machine, describe_versions
from distributed.bench.recovery.costs import Supervision
from distributed.bench.recovery.runs import SIDES, Recovery, Side
from distributed.bench.recovery.workload import PACE_S, SAVE_EVERY

START_RANKS = 4
HANG_TIMEOUT_S = 2.0
TARGET_P50_S = 1.5
TARGET_TIMES_FASTER = 5.0
TARGET_KILLS = 20  # fewer show little
TARGET_START = 0.5  # of torchrun's
TARGET_SUPERVISION = 0.01  # of a step
TARGET_STALL_S = 5.0  # after its deadline


@dataclass(frozen=True)
class Recoveries:
    """Of one side."""

    side: str
    kills: int
    recoveries: tuple[Recovery, ...]

    @property
    def seconds(self) -> list[float]:
        return [recovery.seconds for recovery in self.recoveries]

    @property
    def lost_steps(self) -> int:
        return sum(recovery.lost_steps for recovery in self.recoveries)

    def to_dict(self) -> dict[str, Any]:
        return {
            "side": self.side,
            "kills": self.kills,
            "recovered": len(self.recoveries),
            "p50_s": percentile(self.seconds, 0.5),
            "p95_s": percentile(self.seconds, 0.95),
            "max_s": percentile(self.seconds, 1.0),
            "lost_steps": self.lost_steps,
            "seconds": [round(seconds, 3) for seconds in self.seconds],
        }


@dataclass(frozen=True)
class StallFound:
    """A rank that was stopped with SIGSTOP."""

    late_s: float  # from its deadline until it was named
    is_right: bool  # whether that rank was named


@dataclass(frozen=True)
class Goal:
    """What we hold ourselves to, and whether it was reached here."""

    name: str
    value: float | None  # None: not measured
    limit: float
    unit: str
    passed: bool


@dataclass(frozen=True)
class RecoveryCost:
    """What `distributed bench recovery` found."""

    ranks: int
    seed: int
    recoveries: dict[Side, Recoveries]
    starts_s: dict[Side, list[float]]
    supervision: dict[Side, Supervision]
    in_rank_us: dict[str, float]
    stalls: tuple[StallFound, ...]
    stalls_made: int
    seconds: float
    load_before: float | None
    load_after: float | None

    @property
    def times_faster(self) -> float | None:
        ours, theirs = (percentile(self.recoveries[side].seconds, 0.5) for side in SIDES)
        return theirs / ours if ours and theirs else None

    @property
    def start_part(self) -> float:
        ours, theirs = (median(self.starts_s[side]) for side in SIDES)
        return ours / theirs

    @property
    def in_rank_part(self) -> float:
        return sum(self.in_rank_us.values()) / 1e6 / self.supervision["ours"].step_s

    @property
    def bars(self) -> tuple[Goal, ...]:
        ours, faster = self.recoveries["ours"], self.times_faster
        p50, late = percentile(ours.seconds, 0.5), max((stall.late_s for stall in self.stalls), default=None)
        fewest = min(len(found.recoveries) for found in self.recoveries.values())
        part = self.supervision["ours"].part
        unnamed = self.stalls_made - sum(stall.is_right for stall in self.stalls)
        return (
            Goal("recovery, p50, at most", p50, TARGET_P50_S, "s", p50 is not None and p50 <= TARGET_P50_S),
            Goal(
                "faster than torchrun, at least", faster, TARGET_TIMES_FASTER, "×", (faster or 0) >= TARGET_TIMES_FASTER
            ),
            Goal("recoveries of each side, at least", fewest, TARGET_KILLS, "", fewest >= TARGET_KILLS),
            Goal("kills of ours without recovery", ours.kills - len(ours.recoveries), 0, "", _is_whole(ours)),
            Goal("start, of torchrun's", self.start_part, TARGET_START, "×", self.start_part <= TARGET_START),
            Goal("CPU of the supervisors, less than", part, TARGET_SUPERVISION, "%", part < TARGET_SUPERVISION),
            Goal(
                "a rank's own part of a step, less than",
                self.in_rank_part,
                TARGET_SUPERVISION,
                "%",
                self.in_rank_part < TARGET_SUPERVISION,
            ),
            Goal(
                "a stuck rank is named after its deadline, at most",
                late,
                TARGET_STALL_S,
                "s",
                late is not None and late <= TARGET_STALL_S,
            ),
            Goal("stuck ranks that were not named", unnamed, 0, "", unnamed == 0),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "recovery",
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {
                "ranks": self.ranks,
                "start_ranks": START_RANKS,
                "seed": self.seed,
                "save_every_steps": SAVE_EVERY,
                "pace_s": PACE_S,
                "hang_timeout_s": HANG_TIMEOUT_S,
                "device": "cpu",
            },
            "load_average": {"before": self.load_before, "after": self.load_after},
            "seconds": self.seconds,
            "bars": [asdict(bar) for bar in self.bars],
            "times_faster": self.times_faster,
            "rows": [found.to_dict() for found in self.recoveries.values()],
            "starts_s": {side: [round(s, 3) for s in taken] for side, taken in self.starts_s.items()},
            "start_part": self.start_part,
            "supervision": {
                side: asdict(found) | {"part": found.part, "us_per_step": found.us_per_step}
                for side, found in self.supervision.items()
            },
            "in_rank_us": self.in_rank_us,
            "stalls": {"made": self.stalls_made, "found": [asdict(stall) for stall in self.stalls]},
        }


def percentile(values: Sequence[float], part: float) -> float | None:
    """
    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0, 2.0], 0.95), percentile([], 0.5)
    (2.0, 3.0, None)
    """
    if not values:
        return None
    if part == 0.5:
        return median(values)
    return sorted(values)[math.ceil(part * len(values)) - 1]


def _is_whole(found: Recoveries) -> bool:
    return len(found.recoveries) == found.kills
