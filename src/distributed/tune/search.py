"""Which parameters are tried next: at random, all of a grid, or where Optuna expects the best."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

from distributed.core.errors import Problem
from distributed.core.registry import import_extra
from distributed.tune.runner import OVER, TrialResult, TuneRequest
from distributed.tune.space import Choice, Constant, Domain, Float, Grid, Int, Normal, Space


class Search(Protocol):
    """Proposes parameters, and hears what came of them."""

    @property
    def total(self) -> int:
        """Trials in all."""

    def propose(self, index: int) -> dict[str, Any]:
        """The parameters of the trial with this number, from 0; each is asked for once."""

    def record(self, index: int, params: Mapping[str, Any], value: float | None) -> None:
        """How good a trial was; None: it failed."""


def make_search(request: TuneRequest) -> Search:
    kinds: dict[str, type[Any]] = {"random": RandomSearch, "grid": GridSearch, "bayes": BayesianSearch}
    search: Search = kinds[request.search](request)
    for index, trial in enumerate(request.past):
        if trial.status in OVER:  # the others are recorded when they end
            value = None if trial.status == "failed" else last_value(trial, request.metric)
            search.record(index, trial.params, value)
    return search


def last_value(trial: TrialResult, metric: str) -> float | None:
    """The last that a trial reported or returned."""
    if metric in trial.metrics:
        return trial.metrics[metric]
    values = [report.metrics[metric] for report in trial.history if metric in report.metrics]
    return values[-1] if values else None


class RandomSearch:
    """Each draw follows from the seed and its number alone, so a resumed search makes the same ones.

    With grids in the space, each of their combinations has as many trials, with draws of their own.
    """

    def __init__(self, request: TuneRequest) -> None:
        self._space, self._seed = request.space, request.seed
        self._points = request.space.grid_points()
        self.total = request.num_samples * len(self._points)

    def propose(self, index: int) -> dict[str, Any]:
        drawn = self._space.draw(random.Random(f"{self._seed}/{index}"))
        return drawn | self._points[index % len(self._points)]

    def record(self, index: int, params: Mapping[str, Any], value: float | None) -> None:
        pass


class GridSearch:
    """Every combination of all values, `num_samples` times."""

    def __init__(self, request: TuneRequest) -> None:
        self._points = _as_grid(request.space).grid_points()
        self._constants = {
            name: domain.value for name, domain in request.space.domains.items() if isinstance(domain, Constant)
        }
        self._order = list(request.space.domains)
        self.total = request.num_samples * len(self._points)

    def propose(self, index: int) -> dict[str, Any]:
        point = self._constants | self._points[index % len(self._points)]
        return {name: point[name] for name in self._order}

    def record(self, index: int, params: Mapping[str, Any], value: float | None) -> None:
        pass


def _as_grid(space: Space) -> Space:
    return Space({name: Grid(_values(domain)) for name, domain in space.searched.items()})


def _values(domain: Domain) -> tuple[Any, ...]:
    if isinstance(domain, Int):
        return tuple(range(domain.low, domain.high + 1, domain.step))
    assert isinstance(domain, Choice | Grid), "checked by grid_problems"
    return domain.values


def grid_problems(space: Space) -> list[Problem]:
    """What has no end of values to go through."""
    return [
        Problem(
            f"search='grid', but {name} is a {domain.kind} range",
            why="a grid tries every value, and a range has infinitely many",
            do=f"{name}: {{choice: [a, b, c]}}, or search='random'",
        )
        for name, domain in space.domains.items()
        if isinstance(domain, Float | Normal)
    ]


class BayesianSearch:
    """Optuna's tree-structured Parzen estimator; it learns from every trial that ended."""

    def __init__(self, request: TuneRequest) -> None:
        optuna = import_extra("optuna", "tune", "search='bayes'")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._space = optuna, request.space
        self._distributions = {
            name: as_distribution(optuna.distributions, domain) for name, domain in request.space.searched.items()
        }
        self._study = optuna.create_study(
            direction="minimize" if request.mode == "min" else "maximize",
            # trials that are running count as bad for now, so that parallel ones get other parameters
            sampler=optuna.samplers.TPESampler(seed=_sampler_seed(request), constant_liar=True),
        )
        self._asked: dict[int, Any] = {}
        self._options = {
            name: domain.values for name, domain in request.space.searched.items() if isinstance(domain, Choice | Grid)
        }
        self.total = request.num_samples

    def propose(self, index: int) -> dict[str, Any]:
        trial = self._asked[index] = self._study.ask(self._distributions)
        found = {name: self._value(name, value) for name, value in trial.params.items()}
        constants = {n: d.value for n, d in self._space.domains.items() if isinstance(d, Constant)}
        both = constants | found
        return {name: both[name] for name in self._space.domains}

    def record(self, index: int, params: Mapping[str, Any], value: float | None) -> None:
        optuna = self._optuna
        is_good = value is not None and value == value
        trial = self._asked.pop(index, None)
        if trial is not None:
            self._study.tell(trial, value if is_good else None, state=None if is_good else optuna.trial.TrialState.FAIL)
        elif is_good:  # of the search that this one resumes
            known = {name: self._name(name, params[name]) for name in self._distributions}
            self._study.add_trial(
                optuna.trial.create_trial(params=known, distributions=self._distributions, value=value)
            )

    def _value(self, name: str, drawn: Any) -> Any:
        return self._options[name][drawn] if name in self._options else drawn

    def _name(self, name: str, value: Any) -> Any:
        return self._options[name].index(value) if name in self._options else value


def _sampler_seed(request: TuneRequest) -> int:
    """One of its own for each resume: the first draws of the same one would be those of the search that it resumes."""
    if not request.past:
        return request.seed
    return random.Random(f"{request.seed}/{len(request.past)}/bayes").getrandbits(32)


def as_distribution(distributions: Any, domain: Domain) -> Any:
    """Optuna's word for a domain. A choice is the number of its value, which may be a list."""
    if isinstance(domain, Choice | Grid):
        return distributions.CategoricalDistribution(tuple(range(len(domain.values))))
    if isinstance(domain, Int):
        return distributions.IntDistribution(domain.low, domain.high, log=domain.log, step=domain.step)
    if isinstance(domain, Normal):  # it has no bounds, and Optuna wants some: 99.99 % of it
        return distributions.FloatDistribution(domain.mean - 4 * domain.deviation, domain.mean + 4 * domain.deviation)
    assert isinstance(domain, Float)
    return distributions.FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.step)
