"""TrialLifecycle: what becomes of the trials of a search, on any runner: started, reported, decided on, ended."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributed.core.errors import DistributedError, TaskError
from distributed.observe.trial import TrialNote
from distributed.tune.population import take_over
from distributed.tune.runner import OVER, Status, TrialSpec, TuneRequest, Watcher
from distributed.tune.schedulers import Continue, Decision, Stop, Take, make_scheduler
from distributed.tune.search import last_value, make_search
from distributed.tune.trials.records import Trial

Message = dict[str, Any]  # that a trial sends on its socket
# The state is another trial's, the rates are its own; a loss, optimizer or scheduler that differs starts without state.
_TAKEN_OVER = {"resume_hyperparameters": "config", "allow_change": ["loss", "optimizer", "groups", "scheduler"]}


@dataclass
class Leg:
    """A trial from a start of its process to the end of that process."""

    trial: Trial
    requested_status: Status | None = None  # it was asked to end, and this is what it is then
    outcome: Message | None = None  # how it says that it ended


class TrialLifecycle:
    """The trials of one search. A runner starts what `next` gives it, passes messages to `hear`, and calls `end`."""

    def __init__(self, request: TuneRequest, watcher: Watcher, *, now: Callable[[], float] = time.monotonic) -> None:
        self._request, self._watcher, self._now = request, watcher, now
        self._search, self._scheduler = make_search(request), make_scheduler(request)
        self._trials: dict[str, Trial] = {}
        self._waiting: deque[Trial] = deque()
        self.legs: dict[str, Leg] = {}
        self._take_up_past()

    def _take_up_past(self) -> None:
        for index, past in enumerate(self._request.past):
            trial = Trial.of(past, index)
            self._trials[trial.id] = trial
            self._scheduler.began(trial.id, trial.params)
            trial.status = past.status
            decisions = [self._scheduler.decide(report) for report in past.history]
            if past.status in OVER:
                self._scheduler.ended(trial.id)
            elif decisions and (status := self._verdict(past.history[-1].step, decisions[-1])) is not None:
                trial.status = status  # the search was killed before this trial was over
                self._over(trial)
                self._watcher.ended(trial.result(self._now()))
            else:
                self._scheduler.went_back(trial.id, trial.stands_at)
                self._waiting.append(trial)
        if self._request.schedule.name == "pbt":  # all of a population take turns
            while len(self._trials) < self._search.total:
                self._waiting.append(self._new_trial())

    @property
    def is_over(self) -> bool:
        return not self.legs and not self._has_next

    @property
    def _has_next(self) -> bool:
        return bool(self._waiting) or len(self._trials) < self._search.total

    def _new_trial(self) -> Trial:
        index = len(self._trials)
        trial = Trial.new(self._request, index, self._search.propose(index))
        self._trials[trial.id] = trial
        self._scheduler.began(trial.id, trial.params)
        return trial

    def next(self) -> Trial | None:
        """A trial to start, if one is left; it counts as being on its way from here on."""
        if not self._has_next:
            return None
        trial = self._waiting.popleft() if self._waiting else self._new_trial()
        trial.starts += 1
        trial.status, trial.has_not_reported, trial.reporter_pid, trial.error = "running", True, 0, ""
        self.legs[trial.id] = Leg(trial)
        return trial

    def note(self, trial: Trial, line: str = "") -> TrialNote:
        """What its processes read of it."""
        return trial.note(line, _TAKEN_OVER if trial.lineage else {})

    def started(self, trial: Trial) -> None:
        self._watcher.started(TrialSpec(trial.id, dict(trial.params), trial.directory, trial.failures))

    def hear(self, message: Message, age_s: float = 0.0) -> bool:
        """A trial's message, `age_s` old. Whether the trial continues; if not, its leg says what it leaves as."""
        leg = self.legs.get(message["trial"])
        if leg is None or leg.trial.starts != message["attempt"]:
            return False
        trial, kind, at = leg.trial, message["kind"], self._now() - age_s
        if kind == "began":
            trial.began_at = at
        elif kind == "read":
            self._watcher.read(trial.id, frozenset(message["names"]))
        elif kind == "saved":
            if not trial.is_untried:  # else it is of the state that it has given up for another's
                trial.saved = message["path"]
                trial.saved_step = message["step"] + trial.base(message.get("fit", 1))
        elif kind == "report" and leg.requested_status is None:
            self._reported(leg, message, at)
        elif kind in ("returned", "failed", "left"):
            leg.outcome = message
            if kind == "returned" and leg.requested_status is None:
                self._returned(trial, message["metrics"], at)
        return leg.requested_status is None

    def _returned(self, trial: Trial, metrics: dict[str, float], at: float) -> None:
        """What train_fn returned is the report of a trial that made none, and else adds to its last one."""
        trial.returned = metrics
        if metrics and not trial.history:
            report = trial.add(trial.checkpoint_step + 1, metrics, "", at)
            self._scheduler.decide(report)
            self._watcher.reported(report)

    def _reported(self, leg: Leg, message: Message, at: float) -> None:
        trial = leg.trial
        report = trial.add(
            message["step"],
            message["metrics"],
            message.get("checkpoint", ""),
            at,
            fit=message.get("fit", 0),
            reporter_pid=message.get("pid", 0),
        )
        self._watcher.reported(report)
        decision = self._scheduler.decide(report)
        if message.get("is_last"):  # it is about to end by itself
            return
        leg.requested_status = self._verdict(report.step, decision)
        if leg.requested_status is not None:
            return
        if (isinstance(decision, Take) and self._take(trial, decision, report.step)) or (
            not isinstance(decision, Continue) and self._waiting
        ):
            leg.requested_status = "pending"
        if leg.requested_status == "pending" and not (trial.checkpoint or trial.saved or message["by"] == "trainer"):
            raise TaskError(
                f"trial {trial.id} reported step {report.step} without a checkpoint",
                why="with scheduler='pbt', a trial resumes from the checkpoint of another",
                do="tune.report(metrics, checkpoint={'model': model.state_dict(), …}); begin with tune.checkpoint()",
            )

    def _verdict(self, step: int, decision: Decision) -> Status | None:
        """What a trial is over as after this step; None: it continues."""
        most = self._request.schedule.max_steps
        if most is not None and step >= most:
            return "done"
        return "stopped" if isinstance(decision, Stop) else None

    def _take(self, trial: Trial, decision: Take, step: int) -> bool:
        source = self._trials[decision.source]
        exploit = None if source.status in OVER else take_over(trial, source, decision.params, step)
        if exploit is None:  # there is nothing to take, or nothing left to train after it
            return False
        self._scheduler.began(trial.id, trial.params)
        self._scheduler.went_back(trial.id, exploit.source_step)
        self._watcher.exploited(exploit)
        return True

    def end(self, trial: Trial, ending: str) -> None:
        """Its process has ended; in these words, where it said nothing of it itself."""
        leg = self.legs.pop(trial.id)
        now = self._now()
        trial.seconds, trial.began_at = trial.elapsed(now), None
        status = _final_status(leg)
        if status is None:
            trial.error = (leg.outcome or {}).get("error") or ending
            trial.failures += 1
            status = "pending" if trial.failures <= self._request.max_failures else "failed"
            self._scheduler.went_back(trial.id, trial.stands_at)
        trial.status = status
        if status == "pending":
            self._waiting.append(trial)
        else:
            self._over(trial)
        self._watcher.ended(trial.result(now))

    def _over(self, trial: Trial) -> None:
        value = None if trial.status == "failed" else last_value(trial.result(self._now()), self._request.metric)
        self._search.record(trial.index, trial.params, value)
        self._scheduler.ended(trial.id)

    def interrupt(self) -> None:
        """Something ended the search, and every process with it. A trial that was about to end is over as it was."""
        for leg in self.legs.values():
            status = _final_status(leg)
            leg.trial.status = status if status in OVER else "interrupted"
            with contextlib.suppress(
                DistributedError
            ):  # what ended the search is raised; all trials are recorded first
                self._watcher.ended(leg.trial.result(self._now()))
        self.legs.clear()


def _final_status(leg: Leg) -> Status | None:
    """What a leg was asked to leave as, or ended as by itself; None: neither."""
    if leg.requested_status is not None:
        return leg.requested_status
    if leg.outcome is None or leg.outcome["kind"] != "returned":
        return None
    if leg.trial.is_untried:  # it took over a state after which nothing was left to train
        leg.trial.forget_takeover()
    return "done"


def ending(code: int) -> str:
    """How a process ended that said nothing of it.

    >>> ending(-9), ending(1)
    ('its process was ended by SIGKILL', 'its process ended with exit code 1')
    """
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
