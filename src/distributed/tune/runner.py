"""Runner: the interface of an engine that runs trials for DistributedTuner, and the values that pass between the two.

The tuner checks the input, writes the journal, draws the screen and the results; a runner searches, schedules and runs,
and reports everything that happens to a Watcher. `tune/trials/local.py` is the one of this machine, and
`engines/ray/tune_runner.py` is Ray Tune's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from distributed.core.errors import Problem
from distributed.core.plan import Decision
from distributed.tune.search_dir import SearchDir
from distributed.tune.space import Space

Params = Mapping[str, Any]  # plain values only: what JSON can hold
Mode = Literal["min", "max"]
SearchName = Literal["random", "grid", "bayes"]
SchedulerName = Literal["none", "asha", "median", "pbt"]
Status = Literal["pending", "running", "done", "stopped", "failed", "interrupted"]
OVER: frozenset[Status] = frozenset({"done", "stopped", "failed"})  # a resumed tune does not run these again


@dataclass(frozen=True)
class TrialSpec:
    """A trial that starts or resumes: its parameters and its own folder, run_dir/trials/<id>."""

    id: str  # "0007": the order in which trials were made
    params: Params
    directory: str
    attempt: int = 0  # failures before this one


@dataclass(frozen=True)
class Report:
    """What a trial said once: by `tune.report`, by an epoch of the Trainer, or by what train_fn returned."""

    trial: str
    step: int  # 1, 2, 3 … of this trial; an epoch of the Trainer is a step. Continues after a resume
    metrics: Mapping[str, float]
    seconds: float  # that the trial has run so far, over all its attempts
    checkpoint: str = ""  # a folder that holds the state after this step
    fit: int = 0  # which `fit` of the Trainer in train_fn it is an epoch of, from 1; 0: of none


@dataclass(frozen=True)
class Exploit:
    """A bad trial of a population took over the state of a good one, and continues with other parameters."""

    trial: str
    step: int  # where it stood
    source: str  # the trial that it took over
    source_step: int  # the step of the checkpoint that it took, from which it resumes
    before: Params
    params: Params  # from now on


@dataclass(frozen=True)
class TrialResult:
    """One trial at its end, or as far as it came."""

    id: str
    params: Params
    status: Status
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last report
    history: tuple[Report, ...] = ()
    seconds: float = 0.0
    error: str = ""  # of a failed one: the last line of its traceback
    lineage: tuple[Exploit, ...] = ()
    checkpoint: str = ""  # the newest, a folder
    directory: str = ""
    failures: int = 0  # so far, after which it was tried again but for the last

    @property
    def steps(self) -> int:
        return self.history[-1].step if self.history else 0


@dataclass(frozen=True)
class TrialSchedule:
    """Which scheduler, and its numbers; `max_steps` counts reports (epochs of the Trainer)."""

    name: SchedulerName = "none"
    max_steps: int | None = None  # a trial ends after that many reports; None: when train_fn does
    grace_steps: int = 1  # no trial is stopped before it has reported so often
    reduction_factor: float = 4  # asha: of that many trials at a rung, one continues
    perturb_every: int = 4  # pbt: reports between two looks at the population
    quantile: float = 0.25  # pbt: the worst part, which takes over from the best part
    resample_probability: float = 0.25  # pbt: a parameter is resampled instead of perturbed


@dataclass(frozen=True)
class TuneRequest:
    """All that a runner needs; it was checked by the tuner, but for whether it can be placed."""

    train_fn: Callable[[Any], Any]
    space: Space
    num_samples: int  # trials to draw; with a grid in the space, for each of its points
    run_dir: str
    metric: str = ""  # "": not needed; always set where a scheduler or a search needs it
    mode: Mode = "min"
    search: SearchName = "random"
    schedule: TrialSchedule = field(default_factory=TrialSchedule)
    seed: int = 0
    num_gpus: int | None = None  # devices in all; None: all that are there. Without CUDA: CPU processes
    trials_per_gpu: int = 1  # that share one device
    gpus_per_trial: int = 1  # devices of one trial; above 1, trials_per_gpu is 1
    max_failures: int = 0  # a trial that fails is tried again so often, from its last checkpoint
    address: str | None = None  # of a cluster, for the runner that has one
    past: tuple[TrialResult, ...] = ()  # of the tune that is resumed, in order; see OVER for which are finished

    def better(self, one: float, other: float) -> bool:
        return one < other if self.mode == "min" else one > other

    def trial_dir(self, trial: str) -> str:
        return SearchDir(self.run_dir).trial(trial)


class Watcher(Protocol):
    """Receives what happens, in order, from the thread that called `Runner.run`: the tuner's journal, screen and
    checks. What it raises (a parameter that is never read) ends the search, and every trial with it."""

    def started(self, trial: TrialSpec) -> None: ...

    def reported(self, report: Report) -> None: ...

    def read(self, trial: str, names: frozenset[str]) -> None:
        """These names were read from a trial's parameters so far, also such as it does not have. Reported at the latest
        before `ended`."""

    def exploited(self, exploit: Exploit) -> None: ...

    def ended(self, result: TrialResult) -> None:
        """Also for one that failed and will be tried again: then `status` is "pending"."""

    def refresh(self) -> None:
        """Called a few times a second while nothing happens, for a screen that shows time."""


class Runner(Protocol):
    """An engine that runs trials."""

    name: str

    def obstacles(self, request: TuneRequest) -> list[Problem]:
        """Why the trials cannot be placed on what is there: too few devices, cores … Nothing is started yet."""

    def decisions(self, request: TuneRequest) -> list[Decision]:
        """What was chosen in placing the trials."""

    def slots(self, request: TuneRequest) -> int:
        """Trials that run at the same time."""

    def run(self, request: TuneRequest, watcher: Watcher) -> None:
        """Run all trials to their end. A trial that fails does not end the others. KeyboardInterrupt ends all of them
        in order, reports `ended` with "interrupted" for each that was not about to end, and is raised again."""

    def close(self) -> None:
        """Release what `obstacles`, `slots` and `run` have opened; called once, after success or failure."""
