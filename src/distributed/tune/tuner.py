"""DistributedTuner: many trainings with different parameters, in parallel, and the best parameters of them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from distributed.core.errors import ConfigError, PlanError, Problem
from distributed.core.registry import Entry, Registry
from distributed.core.secrets import mask
from distributed.launch.preflight import new_run_dir
from distributed.observe.charts import why_not_drawn
from distributed.tune.journal import Heading, Journal, Past, holds_search, read_journal
from distributed.tune.results.pictures import write_picture
from distributed.tune.results.reading import ReadCheck
from distributed.tune.results.results import Board, write_results
from distributed.tune.results.screen import SearchScreen
from distributed.tune.runner import Mode, Runner, SchedulerName, SearchName, TrialResult, TrialSchedule, TuneRequest
from distributed.tune.search import grid_problems, make_search
from distributed.tune.search_events import SearchEvents
from distributed.tune.space_reading import SearchSpace, read_space
from distributed.tune.tuner_checks import (
    check_choices,
    check_devices,
    check_function,
    check_numbers,
    check_parts,
    parse_metric,
)

RUNNERS = Registry(
    "tuning engine",
    {
        "local": Entry("distributed.tune.trials.local:LocalRunner"),
        "ray": Entry("distributed.engines.ray.tune_runner:RayRunner", needs="ray", extra="ray"),
    },
)


class DistributedTuner:
    """Searches for the parameters with which `train_fn` trains best.

    `train_fn(config)` gets a dictionary of parameters. It says how good they are by `tune.report({"loss": …})` as it
    goes, by training with a Trainer (each epoch is reported by itself), or by returning a dictionary of metrics.
    `num_gpus` devices are shared by the trials, `trials_per_gpu` on each, or `gpus_per_trial` for each; without CUDA a
    device is a process, of which there may be more than cores.

    >>> def train(config):
    ...     return {"loss": (config["x"] - 3) ** 2}
    >>> tuner = DistributedTuner(train, {"x": {"grid": [1, 3]}}, num_gpus=1, run_dir=tmp / "search", progress=False)
    >>> tuner.tune(num_samples=1)
    {'x': 3}
    """

    def __init__(
        self,
        train_fn: Callable[[Any], Any],
        search_space: SearchSpace,
        num_gpus: int | None = None,
        trials_per_gpu: int = 1,
        *,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        search: SearchName = "random",
        scheduler: SchedulerName = "none",
        max_steps: int | None = None,
        grace_steps: int = 1,
        reduction_factor: float = 4,
        perturb_every: int = 4,
        quantile: float = 0.25,
        resample_probability: float = 0.25,
        gpus_per_trial: int = 1,
        max_failures: int = 0,
        seed: int = 0,
        engine: Literal["auto", "local", "ray"] = "auto",
        address: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        space, problems = read_space(search_space)
        metric, mode, wrong = parse_metric(metric, mode)
        problems += wrong
        options: Mapping[str, Any] = {
            "num_gpus": (num_gpus, 1),
            "trials_per_gpu": (trials_per_gpu, 1),
            "gpus_per_trial": (gpus_per_trial, 1),
            "max_steps": (max_steps, 1),
            "grace_steps": (grace_steps, 1),
            "perturb_every": (perturb_every, 1),
            "max_failures": (max_failures, 0),
        }
        problems += check_numbers(options)
        problems += check_choices(search, scheduler, engine, engines=RUNNERS.entries, address=address, metric=metric)
        problems += check_parts(quantile, reduction_factor, resample_probability)
        problems += check_function(train_fn)
        if not problems:
            problems += check_devices(gpus_per_trial, trials_per_gpu)
        if not problems and search == "grid":
            problems += grid_problems(space)
        if resume and run_dir is None:
            problems.append(
                Problem("resume=True without a run_dir", do="run_dir='runs/tune/…', that of the search to resume")
            )
        if problems:
            raise ConfigError(problems)
        self._request = TuneRequest(
            train_fn=train_fn,
            space=space,
            num_samples=1,
            run_dir=os.path.abspath(run_dir if run_dir is not None else new_run_dir(os.path.join("runs", "tune"))),
            metric=metric or "",
            mode=mode or "min",
            search=search,
            schedule=TrialSchedule(
                scheduler,
                max_steps=max_steps,
                grace_steps=grace_steps,
                reduction_factor=reduction_factor,
                perturb_every=perturb_every,
                quantile=quantile,
                resample_probability=resample_probability,
            ),
            seed=seed,
            num_gpus=num_gpus,
            trials_per_gpu=trials_per_gpu,
            gpus_per_trial=gpus_per_trial,
            max_failures=max_failures,
            address=address,
        )
        self._mode: Mode | None = mode
        self._engine, self._resume, self._progress = engine, resume, progress
        self._board = Board(self._request.metric, mode)

    @property
    def run_dir(self) -> str:
        """Where the journal, the trials' folders and the results are."""
        return self._request.run_dir

    @property
    def results(self) -> list[TrialResult]:
        """All trials, in the order in which they were made."""
        return self._board.trials

    @property
    def best(self) -> TrialResult | None:
        """The best trial so far."""
        return self._board.best if self._board.metric else None

    @property
    def board(self) -> Board:
        """The trials together with what they are compared by."""
        return self._board

    def tune(self, num_samples: int = 10) -> dict[str, Any]:
        """Run the trials, and return the parameters of the best one.

        A grid in the space is gone through `num_samples` times. A trial that fails does not end the others. Ctrl-C ends
        all; `resume=True` with the same run_dir then finishes what was left.
        """
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise ConfigError(
                f"num_samples={num_samples!r}", why="the number of trials is at least 1", do="num_samples=10"
            )
        request = replace(self._request, num_samples=num_samples)
        name, reason = self._choose_engine()
        runner: Runner = RUNNERS.load(name)()
        self._take_up(request, name)  # refuses what cannot be taken up, before anything is written
        try:
            problems = runner.obstacles(request)
            if problems:
                raise PlanError(problems)
            self._run(request, name, reason, runner)
        finally:
            runner.close()
        return dict(self._board.require_best().params)

    def _run(self, request: TuneRequest, name: str, reason: str, runner: Runner) -> None:
        is_new = not holds_search(request.run_dir)
        journal = Journal(request.run_dir)
        with contextlib.closing(journal):
            past = None if is_new else self._take_up(request, name)  # nobody else resumes it from here on
            self._run_from(past, request, name=name, reason=reason, runner=runner, journal=journal)

    def _run_from(
        self, past: Past | None, request: TuneRequest, *, name: str, reason: str, runner: Runner, journal: Journal
    ) -> None:
        request = replace(request, past=() if past is None else past.trials)
        self._board = Board(request.metric, self._mode, request.past, by_last=request.schedule.name == "pbt")
        reading = ReadCheck(request.space.domains, request.train_fn)
        reading.read(() if past is None else past.read)
        slots, decisions = runner.slots(request), runner.decisions(request)
        screen = SearchScreen(self._board, _total(request), slots, shows_progress=self._progress)
        if self._progress:
            screen.note(f"trials run on {name}: {reason} [engine]")
            screen.note(f"{slots} at a time [num_gpus, trials_per_gpu]; all is in {request.run_dir}")
            for decision in decisions:
                screen.note(str(decision))
        try:
            journal.began(self._heading(request, name))
            runner.run(request, SearchEvents(journal, self._board, reading, screen))
        finally:
            screen.close()
            self._finish()
        if self._progress:
            self._sum_up(screen, reading.never_read())

    def _sum_up(self, screen: SearchScreen, unread: list[str]) -> None:
        if unread:
            screen.note(f"warning: no trial read {', '.join(unread)}")
        if not hasattr(self._request.train_fn, "script"):  # the command line shows its own
            screen.table()
            missing = why_not_drawn()
            picture = f"; search.svg needs: {missing}" if missing else " beside search.svg"
            screen.note(f"results.csv and best.yaml are in {self.run_dir}{picture}")

    def _finish(self) -> None:
        """What there is of results, also after Ctrl-C or an error."""
        if any(trial.metrics for trial in self._board.trials):
            with contextlib.suppress(ConfigError):  # raised where a trial ended
                self._board.settle_metric()
            write_results(self._board, self.run_dir, _given(self._request))
            write_picture(self._board, self.run_dir)

    def _choose_engine(self) -> tuple[str, str]:
        if self._engine != "auto":
            return self._engine, "set"
        if self._request.address is not None:
            return "ray", "a cluster's address is given"
        ray = sys.modules.get("ray")
        if ray is not None and getattr(ray, "is_initialized", lambda: False)():
            return "ray", "this process is connected to a Ray cluster"
        return "local", "no address of a Ray cluster is given"

    def _heading(self, request: TuneRequest, engine: str) -> Heading:
        return Heading(
            space=request.space.describe(),
            metric=request.metric,
            mode=request.mode,
            search=request.search,
            scheduler=request.schedule.name,
            seed=request.seed,
            num_samples=request.num_samples,
            engine=engine,
            script=str(getattr(request.train_fn, "script", "")),
            settings=mask(_given(request)),
        )

    def _take_up(self, request: TuneRequest, engine: str) -> Past | None:
        """The search that this one resumes."""
        if not holds_search(request.run_dir):
            return None
        if not self._resume:
            raise ConfigError(
                f"the run directory {request.run_dir} holds another search",
                why="the trials of both searches would be mixed",
                do="set another run_dir, or resume=True to finish that search",
            )
        past = read_journal(request.run_dir)
        new = self._heading(request, engine)
        problems = [
            Problem(
                f"{name} was {getattr(past.heading, name)!r} and is {getattr(new, name)!r}",
                why=f"a search is resumed with the same {name}; {request.run_dir} holds another one",
                do=f"set {name}={getattr(past.heading, name)!r}, or another run_dir",
            )
            for name in ("space", "metric", "mode", "search", "scheduler", "seed")
            if getattr(past.heading, name) != getattr(new, name)
            and not (name in ("metric", "mode") and not past.heading.metric)  # none was named
        ]
        if problems:
            raise ConfigError(problems)
        return past


def _given(request: TuneRequest) -> dict[str, Any]:
    """The settings that all trials of a script have in common."""
    return {name: value for name, (value, _) in getattr(request.train_fn, "given", {}).items()}


def _total(request: TuneRequest) -> int:
    if request.search == "bayes":
        return request.num_samples
    return make_search(replace(request, past=())).total
