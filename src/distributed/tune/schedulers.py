"""Which trials continue: a scheduler decides after each report, from the reports alone. No clock, no processes."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from distributed.tune.runner import Mode, Params, Report, TrialSchedule, TuneRequest
from distributed.tune.space import Choice, Constant, Domain, Float, Grid, Int, Space

_FEWEST = 3  # trials that a median is taken of


@dataclass(frozen=True)
class Continue:
    """To the next report."""


@dataclass(frozen=True)
class Stop:
    """It is not worth more steps."""


@dataclass(frozen=True)
class Yield:
    """Continue, but after a trial that waits: all of a population move forward together."""


@dataclass(frozen=True)
class Take:
    """Continue from the state of another trial, with these parameters."""

    source: str
    params: Params


Decision = Continue | Stop | Yield | Take


class Scheduler(Protocol):
    def decide(self, report: Report) -> Decision:
        """What the trial that reported this does next."""

    def began(self, trial: str, params: Params) -> None:
        """A trial has these parameters from now on; called again when they change."""

    def went_back(self, trial: str, step: int) -> None:
        """A trial resumes from the state after this step, its own or another's."""

    def ended(self, trial: str) -> None:
        """A trial is over: it neither reports nor gives its state any more."""


def make_scheduler(request: TuneRequest) -> Scheduler:
    schedule, metric, mode = request.schedule, request.metric, request.mode
    if schedule.name == "asha":
        return Halving(schedule, metric, mode)
    if schedule.name == "median":
        return MedianStopping(schedule, metric, mode)
    if schedule.name == "pbt":
        return Population(schedule, metric, mode, request.space, request.seed)
    return NoScheduler()


class NoScheduler:
    """Every trial runs to its end."""

    def decide(self, report: Report) -> Decision:
        return Continue()

    def began(self, trial: str, params: Params) -> None:
        pass

    def went_back(self, trial: str, step: int) -> None:
        pass

    def ended(self, trial: str) -> None:
        pass


class Halving(NoScheduler):
    """Asynchronous successive halving (ASHA): at each rung, only the best part of the trials that reached it continues.

    Rungs are at `grace_steps` times the powers of `reduction_factor`. No trial waits: it is compared with those that
    have reached the rung before it, so the first one always continues. A value that is not a number is the worst.
    """

    def __init__(self, schedule: TrialSchedule, metric: str, mode: Mode) -> None:
        self._schedule, self._metric = schedule, metric
        self._sign = 1 if mode == "min" else -1
        self._rungs: dict[int, dict[str, float]] = {}

    def decide(self, report: Report) -> Decision:
        value = report.metrics.get(self._metric)
        decision: Decision = Continue()
        if value is None:
            return decision
        for rung in self._rungs_up_to(report.step):
            reached = self._rungs.setdefault(rung, {})
            if report.trial in reached:
                continue
            reached[report.trial] = _cost(value, self._sign)
            allowed = max(1, int(len(reached) / self._schedule.reduction_factor))
            better = sum(cost < reached[report.trial] for cost in reached.values())
            if better >= allowed or math.isinf(reached[report.trial]):
                decision = Stop()
        return decision

    def _rungs_up_to(self, step: int) -> list[int]:
        rungs, power = [], 0
        while (rung := math.ceil(self._schedule.grace_steps * self._schedule.reduction_factor**power)) <= step:
            if self._schedule.max_steps is None or rung < self._schedule.max_steps:  # at the end all is spent already
                rungs.append(rung)
            power += 1
        return rungs


class MedianStopping(NoScheduler):
    """A trial stops when its best value is worse than the median of the others' means at the same step."""

    def __init__(self, schedule: TrialSchedule, metric: str, mode: Mode) -> None:
        self._schedule, self._metric = schedule, metric
        self._sign = 1 if mode == "min" else -1
        self._costs: dict[str, dict[int, float]] = {}

    def decide(self, report: Report) -> Decision:
        value = report.metrics.get(self._metric)
        if value is None:
            return Continue()
        own = self._costs.setdefault(report.trial, {})
        own[report.step] = _cost(value, self._sign)
        if report.step < self._schedule.grace_steps:
            return Continue()
        others = []
        for trial, costs in self._costs.items():
            by_then = [cost for step, cost in costs.items() if step <= report.step]
            if trial != report.trial and by_then and max(costs) >= report.step:  # one that went back may have no cost
                others.append(statistics.fmean(by_then))
        is_bad = len(others) >= _FEWEST and min(own.values()) > statistics.median(others)
        return Stop() if is_bad or math.isinf(min(own.values())) else Continue()

    def went_back(self, trial: str, step: int) -> None:
        self._costs[trial] = {s: cost for s, cost in self._costs.get(trial, {}).items() if s <= step}
        if not self._costs[trial]:
            del self._costs[trial]


class Population:
    """Population-based training: now and then the worst trials take over the state of the best ones, and continue with
    parameters near theirs, so that parameters change in the course of a training.

    A trial is compared with the others where they stood at its own step at the latest: those that had more turns have
    no advantage. No trial is judged before all that are not over have a value: the first to report would be
    the best of few.
    """

    def __init__(self, schedule: TrialSchedule, metric: str, mode: Mode, space: Space, seed: int) -> None:
        self._schedule, self._metric, self._space = schedule, metric, space
        self._sign = 1 if mode == "min" else -1
        self._random = random.Random(f"{seed}/population")
        self._params: dict[str, Params] = {}
        self._costs: dict[str, dict[int, float]] = {}
        self._looked_at: dict[str, int] = {}  # the step of a trial's last look at the others

    def began(self, trial: str, params: Params) -> None:
        self._params[trial] = params

    def went_back(self, trial: str, step: int) -> None:
        self._looked_at[trial] = step
        self._costs[trial] = {s: cost for s, cost in self._costs.get(trial, {}).items() if s <= step}

    def ended(self, trial: str) -> None:
        self._params.pop(trial, None)
        self._costs.pop(trial, None)

    def decide(self, report: Report) -> Decision:
        value = report.metrics.get(self._metric)
        if value is None:
            return Continue()
        self._costs.setdefault(report.trial, {})[report.step] = _cost(value, self._sign)
        if report.step - self._looked_at.get(report.trial, 0) < self._schedule.perturb_every:
            return Continue()
        ranked = self._ranked(report.step)
        if not self._params.keys() <= set(ranked):
            return Yield()
        self._looked_at[report.trial] = report.step
        count = max(1, int(len(ranked) * self._schedule.quantile))
        best, worst = ranked[:count], ranked[max(count, len(ranked) - count) :]
        if report.trial not in worst or report.step < self._schedule.grace_steps:
            return Yield()
        source = self._random.choice(best)
        return Take(source, perturbed(self._params[source], self._space, self._schedule, self._random))

    def _ranked(self, step: int) -> list[str]:
        """The trials from the best to the worst, as of this step."""
        stood: dict[str, float] = {}
        for trial, costs in self._costs.items():
            known = [s for s in costs if s <= step]
            if known:
                stood[trial] = costs[max(known)]
        return sorted(stood, key=lambda trial: (stood[trial], trial))


def perturbed(params: Params, space: Space, schedule: TrialSchedule, rng: random.Random) -> dict[str, Any]:
    """Parameters near these: each is resampled, or moved to a neighbour. Numbers move by a fifth, up or down.

    >>> rng = random.Random(1)
    >>> perturbed({"lr": 0.1}, Space({"lr": Float(0.01, 1.0)}), TrialSchedule(resample_probability=0), rng)
    {'lr': 0.08}
    """
    return {
        name: _near(params[name], domain, schedule.resample_probability, rng) for name, domain in space.domains.items()
    }


def _near(value: Any, domain: Domain, resample: float, rng: random.Random) -> Any:
    if isinstance(domain, Constant):
        return domain.value
    if rng.random() < resample:
        return domain.draw(rng)
    if isinstance(domain, Choice | Grid):
        at = domain.values.index(value) + rng.choice((-1, 1))
        return domain.values[min(max(at, 0), len(domain.values) - 1)]
    factor = rng.choice((0.8, 1.2))
    moved = domain.fit(value * factor)
    if isinstance(domain, Int) and moved == value:  # a fifth of a small number is none
        moved = domain.fit(value + (domain.step if factor > 1 else -domain.step))
    return round(moved, 12) if isinstance(domain, Float) and not domain.log else moved


def _cost(value: float, sign: int) -> float:
    """Lower is better; not a number is worst."""
    return math.inf if math.isnan(value) else sign * value


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The parameters that differ."""
    return {name: (before.get(name), after[name]) for name in after if before.get(name) != after[name]}
