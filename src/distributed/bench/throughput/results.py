"""What the throughput benchmark found: rates with their spread, and whether all have trained the same."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cache
from math import hypot
from typing import Any

from distributed.bench.interleave import median_error
from distributed.bench.machine import describe_machine, describe_versions
from distributed.bench.throughput.contenders import HAND_WRITTEN, OURS, OWN

TOLERANCE = 0.05  # of the loss before training: how far the trained losses may lie apart
SURE = 2.0  # errors that lie between two rates which are called different


@dataclass(frozen=True)
class ThroughputRow:
    """One contender's figures for one workload: medians over the rounds, with their quartiles."""

    contender: str
    units_per_second: float  # of all processes together
    low: float
    high: float
    step_ms: float
    ratio: float  # to the median of the one that all are compared with
    part_of_peak: float | None  # of the device's dense bf16 operations; None where that is not known
    peak_gib: float  # allocated on the device; on a CPU, the process's memory
    loss: float  # after training, of the same rows for everybody
    rounds: tuple[float, ...]  # units a second


@dataclass(frozen=True)
class Over:
    """One contender's rate over another's, and the standard error of that quotient, from the spread of the rounds."""

    ratio: float
    error: float | None  # None: one round has no spread

    @property
    def verdict(self) -> str:
        """
        >>> Over(1.02, 0.04).verdict, Over(1.2, 0.04).verdict, Over(0.8, 0.04).verdict, Over(3.0, None).verdict
        ('not told apart', 'faster', 'slower', 'by one round')
        """
        if self.error is None:
            return "by one round"
        if abs(self.ratio - 1) <= SURE * self.error:
            return "not told apart"
        return "faster" if self.ratio > 1 else "slower"

    def __str__(self) -> str:
        """
        >>> str(Over(1.2, 0.04)), str(Over(3.0, None))
        ('1.200 ± 0.040, faster', '3.000, by one round')
        """
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.ratio:.3f}{error}, {self.verdict}"


def compare(own: ThroughputRow, other: ThroughputRow) -> Over:
    """By the medians that are shown."""
    ratio = own.units_per_second / other.units_per_second
    if min(len(own.rounds), len(other.rounds)) < 2:
        return Over(ratio, None)
    parts = [median_error(row.rounds) / row.units_per_second for row in (own, other)]
    return Over(ratio, ratio * hypot(*parts))


@dataclass(frozen=True)
class WorkloadResult:
    workload: str
    describes: str
    unit: str
    batch: int  # a process
    steps: int
    warm: int
    rounds: int
    start_loss: float
    rows: tuple[ThroughputRow, ...]
    missing: dict[str, str]

    @property
    def reference(self) -> str:
        return reference([row.contender for row in self.rows])

    def row(self, name: str) -> ThroughputRow | None:
        return next((row for row in self.rows if row.contender == name), None)

    @property
    def losses_agree(self) -> bool | None:
        """Whether all have trained the same: none is faster by doing less. None: there is none to compare with."""
        losses = [row.loss for row in self.rows]
        if len(losses) < 2:
            return None
        return bool(max(losses) - min(losses) <= TOLERANCE * abs(self.start_loss))

    @property
    def ours_over_peers(self) -> dict[str, Over]:
        """Our own median over that of each peer. Not round by round: a turn takes seconds, and what else a machine does
        changes between two turns, so that neighbours have nothing in common that a quotient would take out."""
        ours = self.row(OURS)
        peers = [row for row in self.rows if row.contender not in (*OWN, *HAND_WRITTEN)]
        return {row.contender: compare(ours, row) for row in peers} if ours else {}

    def to_dict(self) -> dict[str, Any]:
        over = {name: asdict(found) | {"verdict": found.verdict} for name, found in self.ours_over_peers.items()}
        judged = {"reference": self.reference, "losses_agree": self.losses_agree, "ours_over_peers": over}
        return asdict(self) | judged


def reference(names: Collection[str]) -> str:
    """Whom all are compared with: a hand-written loop where there is one."""
    return next(name for name in (*HAND_WRITTEN, *OWN, *names) if name in names)


@dataclass(frozen=True)
class Throughput:
    """What `distributed bench throughput` found so far."""

    results: tuple[WorkloadResult, ...]
    device: str
    precision: str
    processes: int
    missing: dict[str, str]
    setups: dict[str, str]
    load_before: float | None
    load_after: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "throughput",
            "unit": "samples, images or tokens a second of all processes; medians over the rounds with quartiles",
            **_where_and_what(),
            "settings": {"device": self.device, "precision": self.precision, "processes": self.processes},
            "loss_tolerance": TOLERANCE,
            "load_average": {"before": self.load_before, "after": self.load_after},
            "setups": self.setups,
            "missing": self.missing,
            "workloads": [result.to_dict() for result in self.results],
        }


@cache
def _where_and_what() -> dict[str, Any]:
    """Asked once: it takes a moment, and results are written after each turn."""
    return {"machine": describe_machine(), "versions": describe_versions()}
