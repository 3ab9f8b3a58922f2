"""How many samples a second: contenders train the same model on the same rows, interleaved in rounds.

Each contender has processes of its own, on a GPU too: what one imports, sets or leaves behind burdens no other. They
are started once and sleep while it is not their turn. A turn is a whole training from the same weights; its clock is
read after its first steps, in which things are compiled and captured, and when the timed ones are done.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from statistics import median, quantiles
from typing import Any

from distributed.bench.interleave import WaitingRanks, room_for
from distributed.bench.machine import PEAK_FLOPS, load_average
from distributed.bench.throughput.contenders import Contender, Contenders
from distributed.bench.throughput.results import Throughput, ThroughputRow, WorkloadResult, reference
from distributed.bench.workloads.models import TINY, WORKLOADS, Workload
from distributed.core.choices import Device
from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import nearest_hint
from distributed.planner.hardware import probe_hardware

# What is measured on a GPU: the dearest minutes first.
_ORDER = ("mlp", "gpt2-124m", "gpt-1.3b", "resnet50", "bert-large", "dlrm", "convnet")
_STEPS = {"mlp": 500, "convnet": 50, "dlrm": 50, "gpt-1.3b": 10}
_FEW = 20
_STEPS_CPU = {"mlp": 50, "convnet": 10}  # short turns: what else runs there then falls on all alike
_LOG_EVERY = 50
_WARM = {"cuda": 20, "cpu": 10}  # on a GPU things are compiled and captured meanwhile
# On a GPU: steps of an MLP are short, and those that are logged come seldom; those of a large model are long.
_WARM_OTHERS = {"mlp": 100, "gpt-1.3b": 10}

Notify = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ThroughputRequest:
    """What the command line asks for."""

    workloads: tuple[str, ...]
    device: Device
    precision: str
    processes: int
    rounds: int
    steps: int | None = None  # None: by workload
    seconds: float | None = None  # for each workload, after which nothing more is begun
    tiny: bool = False


def choose_workloads(asked: Sequence[str] | None, device: str, tiny: bool) -> tuple[str, ...]:
    known = TINY if tiny else WORKLOADS
    unknown = [name for name in asked or () if name not in known]
    if unknown:
        raise ConfigError([Problem(f"there is no workload {n!r}", do=nearest_hint(n, known)) for n in unknown])
    large = [name for name in asked or () if device == "cpu" and not known[name].on_cpu]
    if large:
        raise ConfigError(f"{', '.join(large)} on a CPU", why="one step takes minutes there", do="use a GPU")
    usual = ("mlp", "convnet") if device == "cpu" else _ORDER
    return tuple(asked or [name for name in usual if name in known])


def measure_throughput(request: ThroughputRequest, contenders: Contenders, notify: Notify) -> Iterator[Throughput]:
    """After each turn, all that was found until then: who has to stop in the middle keeps the rest."""
    load_before, done = load_average(), tuple[WorkloadResult, ...]()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        notify("starting", 0, 1)
        taking = {name for workload in request.workloads for name in contenders.of(workload, request.precision)}
        known = {name: contenders.known[name] for name in contenders.names if name in taking}
        ranks = _start(known, request, folder, stack)
        where = request.device, request.precision, request.processes, contenders.missing, contenders.setups, load_before
        for name in request.workloads:
            for result in _Contest(name, request, contenders, ranks, notify).measure():
                yield Throughput((*done, result), *where, load_average())
            done = (*done, result)
        for waiting in ranks.values():  # one that had no turn may still be on its way, and must find a listener
            waiting.connect()


def _start(
    contenders: Mapping[str, Contender], request: ThroughputRequest, folder: str, stack: ExitStack
) -> dict[str, WaitingRanks]:
    """All at once: importing takes each of them seconds. On a GPU the first is not kept waiting for the others: it has
    models to compile before anything is timed."""
    ranks, module = {}, "distributed.bench.throughput.rank"
    for name, contender in contenders.items():
        stack.enter_context(room_for(contender.engine, request.processes))
        forks = request.device == "cpu" and contender.engine != "ray"  # which starts its workers itself
        waiting = WaitingRanks(
            name,
            ranks=request.processes,
            command=(module, name, contender.target, request.device),
            folder=folder,
            engine=contender.engine,
            device=request.device,
            preload=(module, contender.target.partition(":")[0]) if forks else (),
        )
        ranks[name] = stack.enter_context(waiting)
    for waiting in ranks.values() if request.device == "cpu" else ():
        waiting.connect()
    return ranks


class _Contest:
    """One workload: a rehearsal, then rounds for as long as the time goes."""

    def __init__(
        self,
        name: str,
        request: ThroughputRequest,
        contenders: Contenders,
        ranks: dict[str, WaitingRanks],
        notify: Notify,
    ) -> None:
        self._name, self._request, self._ranks, self._notify = name, request, ranks, notify
        self._contenders = contenders
        self._workload: Workload = (TINY if request.tiny else WORKLOADS)[name]
        defaults = _STEPS if request.device == "cuda" else _STEPS_CPU
        self._steps = request.steps or defaults.get(name, _FEW)
        self._log_every = _LOG_EVERY if self._steps % _LOG_EVERY == 0 else self._steps
        warm = _WARM_OTHERS.get(name, _WARM["cuda"]) if request.device == "cuda" else _WARM["cpu"]
        self._warm = -(-warm // self._log_every) * self._log_every
        self._names = list(contenders.of(name, request.precision))
        self._in_all = (request.rounds + 1) * len(self._names)
        self._turns: dict[str, list[dict[str, Any]]] = {}
        self._missing: dict[str, str] = {}
        self._start_loss = float("nan")
        self._begun = time.monotonic()

    def measure(self) -> Iterator[WorkloadResult]:
        """What is known after each turn; the last is all of it."""
        yield from self._rehearse()
        took = self._elapsed()
        for number in range(self._request.rounds):
            begun = self._elapsed()
            if self._is_over(took):
                break
            for name in list(self._turns) if number % 2 else list(reversed(self._turns)):
                text = f"{self._name}: round {number + 1} of {self._request.rounds}: {name}"
                self._notify(text, len(self._names) * (number + 1), self._in_all)
                self._take(name)
                yield from self._found()
            took = self._elapsed() - begun
        if not self._turns:
            raise ConfigError(f"no contender could train {self._name}", why="; ".join(self._missing.values()))
        yield self._summarize()

    def _rehearse(self) -> Iterator[WorkloadResult]:
        """Everything is compiled here, and stays in caches. Where there is no time for more, this is what counts."""
        for done, name in enumerate(self._names):
            if self._is_over():
                self._missing[name] = f"no time was left of {self._request.seconds:.0f} s"
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
        contender = self._contenders.known[name]
        return {
            "workload_name": self._name,
            "tiny": self._request.tiny,
            "steps": self._steps,
            "warm": self._warm,
            "precision": "bf16" if self._request.precision == "fp8" else self._request.precision,
            "log_every": self._log_every,
            "compiles": contender.is_compiled(self._name, self._request.device),
            "settings": dict(contender.settings),
            "tells_start": is_first,
        }

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _is_over(self, wanted: float = 0.0) -> bool:
        return self._request.seconds is not None and self._elapsed() + wanted > self._request.seconds

    def _summarize(self) -> WorkloadResult:
        units = self._workload.batch * self._workload.units_per_sample * self._request.processes * self._steps
        counted = {
            name: turns[1:] or turns for name, turns in self._turns.items()
        }  # the rehearsal alone, or not at all
        rates = {name: [units / turn["seconds"] for turn in turns] for name, turns in counted.items()}
        rows = [self._row(name, own, rates[reference(rates)]) for name, own in rates.items()]
        return WorkloadResult(
            self._name,
            describes=self._workload.describes,
            unit=self._workload.unit,
            batch=self._workload.batch,
            steps=self._steps,
            warm=self._warm,
            rounds=max(map(len, rates.values())),
            start_loss=self._start_loss,
            rows=tuple(sorted(rows, key=lambda row: -row.units_per_second)),
            missing=dict(self._missing),
        )

    def _row(self, name: str, rates: list[float], compared: list[float]) -> ThroughputRow:
        rate = median(rates)
        low, _, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (rate, rate, rate)
        units = self._workload.batch * self._workload.units_per_sample * self._request.processes
        last = self._turns[name][-1]
        ratio = rate / median(compared)
        part = _part_of_peak(rate, self._workload.flops_per_unit, self._request)
        return ThroughputRow(
            name,
            units_per_second=rate,
            low=low,
            high=high,
            step_ms=units / rate * 1e3,
            ratio=ratio,
            part_of_peak=part,
            peak_gib=last["peak_gib"],
            loss=last["loss"],
            rounds=tuple(rates),
        )


def _part_of_peak(rate: float, flops_per_unit: float | None, request: ThroughputRequest) -> float | None:
    peak = _peak_flops() if request.device == "cuda" and request.precision != "fp32" else None
    return None if peak is None or flops_per_unit is None else rate * flops_per_unit / (peak * request.processes)


@cache
def _peak_flops() -> float | None:
    gpus = probe_hardware().gpus
    return next((flops for gpu in gpus[:1] for name, flops in PEAK_FLOPS.items() if name in gpu.name), None)
