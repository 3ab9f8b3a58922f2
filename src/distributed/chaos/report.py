"""What a chaos run came to: figures, what is wrong with them, and how both are shown. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from distributed.core.choices import ChaosKind

CLOSE = 1e-3  # the largest difference of a weight after another number of ranks summed some gradients

_OTHER_RANKS = "another number of ranks adds in another order and draws other dropout: set reproducible=bitwise"
_OTHER_BEGINNING = (
    "the two runs did not begin alike, they differed before the first fault: call torch.manual_seed(…) before the "
    "model and the data are made"
)


@dataclass
class Injury:
    """One fault, and what became of it."""

    kind: ChaosKind
    time_s: float  # since the start of the disturbed run
    step: int
    attempt: int
    text: str = ""
    recovered_s: float | None = None  # from the harm to the first new step, or until it was over
    broke: bool = False  # whether the world broke, so that the run had to recover
    source: str = ""  # of the state that the run resumed from
    lost_steps: int = 0
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # what should not have happened


@dataclass(frozen=True)
class WeightsComparison:
    """The final weights against those of the undisturbed run."""

    is_identical: bool
    tensors: int
    differing: int = 0
    largest: float = 0.0
    largest_in: str = ""
    first_step: int | None = None  # of the first checkpoint that both have and that differs
    problem: str = ""  # why they could not be compared

    def __str__(self) -> str:
        if self.problem:
            return f"NOT COMPARED: {self.problem}"
        if self.is_identical:
            return f"IDENTICAL bytes in all {self.tensors} tensors"
        first = f"; first seen in the checkpoint of step {self.first_step}" if self.first_step is not None else ""
        worst = f"by up to {self.largest:.3g} in {self.largest_in}"
        return f"DIFFERENT: {self.differing} of {self.tensors} tensors, {worst}{first}"


@dataclass(frozen=True)
class Samples:
    """Against what the undisturbed run used, epoch by epoch."""

    used: int
    lost: int
    repeated: int


@dataclass
class ChaosReport:
    script: str
    seed: int
    steps: int  # of the undisturbed run
    undisturbed_s: float
    step_s: float = 0.0  # the mean of the undisturbed run
    disturbed_s: float = 0.0
    reached: int = 0
    finished: bool = False
    ending: str = ""  # how it ended, where it did not finish
    injuries: list[Injury] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    wanted: int | None = None  # faults that were asked for
    goodput_reported: float | None = None  # by the run itself, which counts from when it noticed a fault
    attempts: int = 1
    was_resized: bool = False
    is_bitwise: bool = False
    tolerance: float | None = None
    began_alike: bool = True  # as far as is known
    samples: Samples | None = None
    weights: WeightsComparison | None = None

    @property
    def by_kind(self) -> dict[str, int]:
        return dict(Counter(injury.kind for injury in self.injuries))

    @property
    def recoveries(self) -> list[float]:
        """Seconds, of the faults that broke the world."""
        return _times(self.injuries)

    @property
    def goodput(self) -> float | None:
        """The part of the time in which steps were taken that count. Lost: from each harm that broke the world to the
        first new step, and the steps that were taken again, at the mean length of a step."""
        waited, again = sum(self.recoveries), sum(injury.lost_steps for injury in self.injuries)
        if not self.finished or waited >= self.disturbed_s:
            return None
        mean_step = (self.disturbed_s - waited) / (self.reached + again)
        return 1.0 - (waited + again * mean_step) / self.disturbed_s

    @property
    def allowed(self) -> float:
        """By how much a weight may differ."""
        if self.tolerance is not None:
            return self.tolerance
        return CLOSE if self.was_resized and not self.is_bitwise else 0.0

    @property
    def failures(self) -> list[str]:
        """Why this run does not prove what it should; empty where it does."""
        found = [f"{injury.kind} at step {injury.step}: {text}" for injury in self.injuries for text in injury.wrong]
        if not self.finished:
            found.append(f"the disturbed run did not finish: {self.ending}")
        if not self.injuries:
            found.append(f"no fault fell into the {self.disturbed_s:.0f} s of the run: raise --steps, or lower --mtbf")
        elif self.wanted is not None and len(self.injuries) < self.wanted:
            found.append(f"only {len(self.injuries)} of {self.wanted} faults fell into the run: raise --steps")
        if self.finished and self.samples is None:
            found.append("which samples were used is not known")
        elif self.samples is not None and (self.samples.lost or self.samples.repeated):
            found.append(f"{self.samples.lost} samples were lost and {self.samples.repeated} repeated")
        if self.weights is not None and not self._is_close(self.weights):
            hint = ""
            if not self.began_alike:
                hint = f"; {_OTHER_BEGINNING}"
            elif self.was_resized and not self.is_bitwise:
                hint = f"; {_OTHER_RANKS}"
            found.append(f"the weights: {self.weights}{hint}")
        return found

    def _is_close(self, weights: WeightsComparison) -> bool:
        return not weights.problem and (weights.is_identical or weights.largest <= self.allowed)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "faults": self.by_kind,
            "recovered": sum(injury.recovered_s is not None for injury in self.injuries),
            "goodput": self.goodput,
            "recovery_p50_s": quantile(self.recoveries, 0.5),
            "recovery_p95_s": quantile(self.recoveries, 0.95),
            "allowed_difference": self.allowed,
            "failures": self.failures,
            "passed": not self.failures,
        }


def quantile(values: Sequence[float], part: float) -> float | None:
    """The smallest value that so large a part of them does not exceed; None where there is none.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([], 0.5)
    (2.0, None)
    """
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else None


def table(report: ChaosReport) -> Group:
    """A row a kind of fault, then the run as a whole and the verdict."""
    faults = Table(box=None, pad_edge=False, header_style="bold")
    faults.add_column("fault", no_wrap=True)
    for name in ("injected", "recovered", "in p50", "p95", "steps again"):
        faults.add_column(name, justify="right", no_wrap=True)
    for kind in [*report.by_kind, *(["all"] if len(report.by_kind) > 1 else [])]:
        of_kind = [injury for injury in report.injuries if kind in ("all", injury.kind)]
        faults.add_row(
            kind,
            str(len(of_kind)),
            str(sum(injury.recovered_s is not None for injury in of_kind)),
            _seconds(quantile(_times(of_kind), 0.5)),
            _seconds(quantile(_times(of_kind), 0.95)),
            str(sum(injury.lost_steps for injury in of_kind)),
        )
    lines = [""]
    lines.append(f"run        {report.reached} of {report.steps} steps in {report.attempts} attempts")
    lines.append(f"time       {report.disturbed_s:.1f} s; undisturbed {report.undisturbed_s:.1f} s")
    if report.goodput is not None:
        lines.append(f"goodput    {100 * report.goodput:.1f} %")
    if report.samples is not None:
        samples = report.samples
        lines.append(f"samples    {samples.used} used, {samples.lost} lost, {samples.repeated} repeated")
    if report.weights is not None:
        allowed = f" (allowed: {report.allowed:g})" if report.allowed else ""
        lines.append(f"weights    {report.weights}{allowed}")
    lines += [f"left out   {text}" for text in report.skipped]
    failures = report.failures
    verdict = Text("PASSED", style="bold green") if not failures else Text("FAILED", style="bold red")
    return Group(
        *([faults] if report.injuries else []),
        Text("\n".join(lines)),
        Text("verdict    ") + verdict,
        *(Text(f"  - {text}", style="red") for text in failures),
    )


def _times(injuries: Sequence[Injury]) -> list[float]:
    return [injury.recovered_s for injury in injuries if injury.broke and injury.recovered_s is not None]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"
