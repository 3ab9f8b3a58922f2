"""What a tuner is asked for, checked before anything starts: numbers, names, and what excludes each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from distributed.core.errors import Problem
from distributed.core.registry import nearest_hint
from distributed.core.values import parse_best
from distributed.tune.runner import Mode, SchedulerName, SearchName

_SEARCHES: tuple[SearchName, ...] = get_args(SearchName)
_SCHEDULERS: tuple[SchedulerName, ...] = get_args(SchedulerName)


def parse_metric(metric: str | None, mode: str | None) -> tuple[str | None, Mode | None, list[Problem]]:
    """'val_loss', or 'min:mae'; `mode` says the same."""
    if mode not in (None, "min", "max"):
        return (
            metric,
            None,
            [
                Problem(
                    f"mode={mode!r}", why="the best value is the smallest or the largest", do="mode='min' or mode='max'"
                )
            ],
        )
    if metric is None:
        return None, "max" if mode == "max" else "min" if mode else None, []
    if mode is not None:
        return metric, "max" if mode == "max" else "min", []
    try:
        direction, name = parse_best(metric)
    except ValueError:
        what = f"metric={metric!r} does not say which is best"
        return metric, None, [Problem(what, do="mode='min' or mode='max'")]
    return name, "max" if direction == "max" else "min", []


def check_function(train_fn: object) -> list[Problem]:
    if callable(train_fn):
        return []
    return [Problem(f"train_fn is a {type(train_fn).__name__}", do="pass a function that takes a dictionary")]


def check_devices(gpus_per_trial: int, trials_per_gpu: int) -> list[Problem]:
    if gpus_per_trial <= 1 or trials_per_gpu <= 1:
        return []
    what = f"gpus_per_trial={gpus_per_trial} and trials_per_gpu={trials_per_gpu}"
    why = "a trial has several devices of its own, or shares one device"
    return [Problem(what, why=why, do="set one of them to 1")]


def check_numbers(options: Mapping[str, tuple[Any, int]]) -> list[Problem]:
    problems = []
    for name, (value, least) in options.items():
        if value is None:
            continue
        if isinstance(value, float) and name in ("trials_per_gpu", "gpus_per_trial"):
            do = "for several trials on a device: trials_per_gpu=2; for several devices a trial: gpus_per_trial=2"
            problems.append(Problem(f"{name}={value!r} is not a whole number", do=do))
        elif isinstance(value, bool) or not isinstance(value, int) or value < least:
            problems.append(
                Problem(f"{name}={value!r}", why=f"{name} is a whole number of at least {least}", do=f"{name}={least}")
            )
    return problems


def check_parts(quantile: float, reduction_factor: float, resample: float) -> list[Problem]:
    problems = []
    if not 0 < quantile <= 0.5:
        problems.append(
            Problem(
                f"quantile={quantile!r}",
                why="the part of the population that is replaced is above 0 and at most 0.5",
                do="quantile=0.25",
            )
        )
    if not reduction_factor > 1:
        problems.append(
            Problem(
                f"reduction_factor={reduction_factor!r}",
                why="each round keeps one trial in reduction_factor, which must be above 1",
                do="reduction_factor=4",
            )
        )
    if not 0 <= resample <= 1:
        problems.append(
            Problem(
                f"resample_probability={resample!r}", why="a probability is from 0 to 1", do="resample_probability=0.25"
            )
        )
    return problems


def check_choices(
    search: str, scheduler: str, engine: str, *, engines: Iterable[str], address: str | None, metric: str | None
) -> list[Problem]:
    problems = []
    for name, value, known in (
        ("search", search, _SEARCHES),
        ("scheduler", scheduler, _SCHEDULERS),
        ("engine", engine, ("auto", *engines)),
    ):
        if value not in known:
            problems.append(Problem(f"{name}={value!r} is not known", do=nearest_hint(str(value), known)))
    if metric is None and (scheduler != "none" or search == "bayes"):
        steers = f"scheduler={scheduler!r}" if scheduler != "none" else "search='bayes'"
        problems.append(
            Problem(
                f"{steers} without a metric",
                why=f"{steers} compares trials by a metric, and none is given",
                do="metric='val_loss'",
            )
        )
    if search == "bayes" and scheduler == "pbt":
        why = "a population's parameters change in the course of a trial, and the search would learn from the last ones"
        problems.append(
            Problem("search='bayes' with scheduler='pbt'", why=why, do="search='random', or another scheduler")
        )
    if engine == "local" and address is not None:
        what = f"engine='local' and address={address!r}"
        problems.append(Problem(what, why="an address is that of a Ray cluster", do="leave one of them out"))
    return problems
