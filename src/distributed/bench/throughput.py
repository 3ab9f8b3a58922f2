"""How many samples a second: contenders train the same model on the same rows, in rounds by turns.

Each contender has processes of its own, on a GPU too: what one imports, sets or leaves behind burdens no other. They
are started once and sleep while it is not their turn. A turn is a whole training from the same weights; its clock is
read after its first steps, in which things are compiled and captured, and when the timed ones are done.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from math import hypot
from statistics import median, quantiles
from typing import Any

from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.bench.models import TINY, WORKLOADS, Workload
from distributed.bench.overhead import median_error
from distributed.bench.strategies import PEAK_FLOPS
from distributed.bench.throughput_field import BARE, BEST, BY_HAND, CONTENDERS, FLOOR, OURS, OWN, Field, is_compiled
from distributed.bench.turns import WaitingRanks, room_for
from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import nearest_hint
from distributed.planner.hardware import probe_hardware

TOLERANCE = 0.05  # of the loss before training: how far the trained losses may lie apart
SURE = 2.0  # errors that lie between two rates which are called different
_STEPS = {"mlp": 500, "convnet": 50, "dlrm": 50, "gpt-1.3b": 10}
_FEW = 20
_STEPS_CPU = {"mlp": 50, "convnet": 10}  # short turns: what else runs there then falls on all alike
_LOG_EVERY = 50
_WARM = {"cuda": 20, "cpu": 10}  # on a GPU things are compiled and captured meanwhile
# On a GPU: steps of an MLP are short, and those that are logged come seldom; those of a large model are long.
_WARM_OTHERS = {"mlp": 100, "gpt-1.3b": 10}

Notify = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
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


def compare(own: Row, other: Row) -> Over:
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
    rows: tuple[Row, ...]
    missing: dict[str, str]

    @property
    def reference(self) -> str:
        """Whom all are compared with: a loop by hand where there is one."""
        return _reference({row.contender for row in self.rows})

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.contender == name), None)

    @property
    def losses_agree(self) -> bool | None:
        """Whether all have trained the same: nobody is faster by doing less. None: there is nobody to compare with."""
        losses = [row.loss for row in self.rows]
        if len(losses) < 2:
            return None
        return bool(max(losses) - min(losses) <= TOLERANCE * abs(self.start_loss))

    @property
    def ours_over_peers(self) -> dict[str, Over]:
        """Our own median over that of each peer. Not round by round: a turn takes seconds, and what else a machine does
        changes between two turns, so that neighbours have nothing in common that a quotient would take out."""
        ours = self.row(OURS)
        peers = [row for row in self.rows if row.contender not in (*OWN, *BY_HAND)]
        return {row.contender: compare(ours, row) for row in peers} if ours else {}

    def to_dict(self) -> dict[str, Any]:
        over = {name: asdict(found) | {"verdict": found.verdict} for name, found in self.ours_over_peers.items()}
        judged = {"reference": self.reference, "losses_agree": self.losses_agree, "ours_over_peers": over}
        return asdict(self) | judged


def _reference(names: Container[str]) -> str:
    return next(name for name in (BEST, BARE, FLOOR, *CONTENDERS.entries) if name in names)


@dataclass(frozen=True)
class Throughput:
    """What `distributed bench throughput` found so far."""

    results: tuple[WorkloadResult, ...]
    device: str
    precision: str
    processes: int
    missing: dict[str, str]
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
            "setups": {name: entry.setup for name, entry in CONTENDERS.entries.items()},
            "missing": self.missing,
            "workloads": [result.to_dict() for result in self.results],
        }


@dataclass(frozen=True)
class Wish:
    """What the command line asks for."""

    workloads: tuple[str, ...]
    device: str
    precision: str
    processes: int
    rounds: int
    steps: int | None = None  # None: by workload
    seconds: float | None = None  # for each workload, after which nothing more is begun
    tiny: bool = False


def choose_workloads(asked: Sequence[str] | None, device: str, order: Sequence[str], tiny: bool) -> tuple[str, ...]:
    known = TINY if tiny else WORKLOADS
    unknown = [name for name in asked or () if name not in known]
    if unknown:
        raise ConfigError([Problem(f"there is no workload {n!r}", do=nearest_hint(n, known)) for n in unknown])
    large = [name for name in asked or () if device == "cpu" and not known[name].on_cpu]
    if large:
        raise ConfigError(f"{', '.join(large)} on a CPU", why="one step takes minutes there", do="use a GPU")
    usual = ("mlp", "convnet") if device == "cpu" else order
    return tuple(asked or [name for name in usual if name in known])


def measure_throughput(wish: Wish, field: Field, notify: Notify) -> Iterator[Throughput]:
    """After each turn, all that was found until then: who has to stop in the middle keeps the rest."""
    load_before, done = load_average(), tuple[WorkloadResult, ...]()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        notify("starting", 0, 1)
        taking = {name for workload in wish.workloads for name in field.of(workload, wish.precision)}
        ranks = _start([name for name in field.names if name in taking], wish, folder, stack)
        where = wish.device, wish.precision, wish.processes, field.missing, load_before
        for name in wish.workloads:
            for result in _Contest(name, wish, field, ranks, notify).measure():
                yield Throughput((*done, result), *where, load_average())
            done = (*done, result)
        for waiting in ranks.values():  # one that had no turn may still be on its way, and must find somebody there
            waiting.connect()


def _start(names: Sequence[str], wish: Wish, folder: str, stack: ExitStack) -> dict[str, WaitingRanks]:
    """All at once: importing takes each of them seconds. On a GPU the first is not kept waiting for the others: it has
    models to compile before anything is timed."""
    ranks = {}
    for name in names:
        entry, module = CONTENDERS.entries[name], "distributed.bench.throughput_rank"
        stack.enter_context(room_for(entry.engine, wish.processes))
        forks = wish.device == "cpu" and entry.engine != "ray"  # which starts its workers itself
        preload = (module, entry.target.partition(":")[0]) if forks else ()
        command = (module, name, wish.device)
        waiting = WaitingRanks(name, wish.processes, command, folder, entry.engine, wish.device, preload)
        ranks[name] = stack.enter_context(waiting)
    for waiting in ranks.values() if wish.device == "cpu" else ():
        waiting.connect()
    return ranks


class _Contest:
    """One workload: a rehearsal, then rounds for as long as the time goes."""

    def __init__(self, name: str, wish: Wish, field: Field, ranks: dict[str, WaitingRanks], notify: Notify) -> None:
        self._name, self._wish, self._ranks, self._notify = name, wish, ranks, notify
        self._workload: Workload = (TINY if wish.tiny else WORKLOADS)[name]
        defaults = _STEPS if wish.device == "cuda" else _STEPS_CPU
        self._steps = wish.steps or defaults.get(name, _FEW)
        self._log_every = _LOG_EVERY if self._steps % _LOG_EVERY == 0 else self._steps
        warm = _WARM_OTHERS.get(name, _WARM["cuda"]) if wish.device == "cuda" else _WARM["cpu"]
        self._warm = -(-warm // self._log_every) * self._log_every
        self._names = list(field.of(name, wish.precision))
        self._in_all = (wish.rounds + 1) * len(self._names)
        self._turns: dict[str, list[dict[str, Any]]] = {}
        self._missing: dict[str, str] = {}
        self._start_loss = float("nan")
        self._begun = time.monotonic()

    def measure(self) -> Iterator[WorkloadResult]:
        """What is known after each turn; the last is all of it."""
        yield from self._rehearse()
        took = self._elapsed()
        for number in range(self._wish.rounds):
            begun = self._elapsed()
            if self._is_over(took):
                break
            for name in list(self._turns) if number % 2 else list(reversed(self._turns)):
                text = f"{self._name}: round {number + 1} of {self._wish.rounds}: {name}"
                self._notify(text, len(self._names) * (number + 1), self._in_all)
                self._take(name)
                yield from self._found()
            took = self._elapsed() - begun
        if not self._turns:
            raise ConfigError(f"nobody could train {self._name}", why="; ".join(self._missing.values()))
        yield self._summarize()

    def _rehearse(self) -> Iterator[WorkloadResult]:
        """Everything is compiled here, and stays in caches. Where there is no time for more, this is what counts."""
        for done, name in enumerate(self._names):
            if self._is_over():
                self._missing[name] = f"no time was left of {self._wish.seconds:.0f} s"
                continue
            self._notify(f"{self._name}: rehearsing {name}", done, self._in_all)
            self._turns[name] = []
            self._take(name, is_first=len(self._turns) == 1)
            yield from self._found()

    def _found(self) -> Iterator[WorkloadResult]:
        if self._turns:
            yield self._summarize()

    def _take(self, name: str, is_first: bool = False) -> None:
        if name not in self._turns:
            return
        self._ranks[name].connect()
        found = self._ranks[name].ask(self._order(name, is_first))[0]
        if "failed" in found:
            self._missing[name] = found["failed"]
            del self._turns[name]
            return
        if is_first:
            self._start_loss = found["start_loss"]
        self._turns[name].append(found)

    def _order(self, name: str, is_first: bool) -> dict[str, Any]:
        return {
            "workload_name": self._name,
            "tiny": self._wish.tiny,
            "steps": self._steps,
            "warm": self._warm,
            "precision": "bf16" if self._wish.precision == "fp8" else self._wish.precision,
            "log_every": self._log_every,
            "compiles": is_compiled(name, self._name, self._wish.device),
            "settings": dict(CONTENDERS.entries[name].settings),
            "tells_start": is_first,
        }

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _is_over(self, wanted: float = 0.0) -> bool:
        return self._wish.seconds is not None and self._elapsed() + wanted > self._wish.seconds

    def _summarize(self) -> WorkloadResult:
        units = self._workload.batch * self._workload.units_per_sample * self._wish.processes * self._steps
        counted = {
            name: turns[1:] or turns for name, turns in self._turns.items()
        }  # the rehearsal alone, or not at all
        rates = {name: [units / turn["seconds"] for turn in turns] for name, turns in counted.items()}
        rows = [self._row(name, own, rates[_reference(rates)]) for name, own in rates.items()]
        return WorkloadResult(
            self._name,
            self._workload.describes,
            self._workload.unit,
            self._workload.batch,
            self._steps,
            self._warm,
            max(map(len, rates.values())),
            self._start_loss,
            tuple(sorted(rows, key=lambda row: -row.units_per_second)),
            dict(self._missing),
        )

    def _row(self, name: str, rates: list[float], compared: list[float]) -> Row:
        rate = median(rates)
        low, _, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (rate, rate, rate)
        units = self._workload.batch * self._workload.units_per_sample * self._wish.processes
        last = self._turns[name][-1]
        ratio = rate / median(compared)
        part = _part_of_peak(rate, self._workload.flops_per_unit, self._wish)
        return Row(name, rate, low, high, units / rate * 1e3, ratio, part, last["peak_gib"], last["loss"], tuple(rates))


def _part_of_peak(rate: float, flops_per_unit: float | None, wish: Wish) -> float | None:
    peak = _peak_flops() if wish.device == "cuda" and wish.precision != "fp32" else None
    return None if peak is None or flops_per_unit is None else rate * flops_per_unit / (peak * wish.processes)


@cache
def _peak_flops() -> float | None:
    gpus = probe_hardware().gpus
    return next((flops for gpu in gpus[:1] for name, flops in PEAK_FLOPS.items() if name in gpu.name), None)


@cache
def _where_and_what() -> dict[str, Any]:
    """Asked once: it takes a moment, and results are written after each turn."""
    return {"machine": describe_machine(), "versions": describe_versions()}
