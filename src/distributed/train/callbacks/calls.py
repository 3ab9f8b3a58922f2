"""Callbacks: the calls of a run's callbacks, and what they have asked for, agreed on by all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from distributed.core.errors import CallbackError, DistributedError
from distributed.core.protocol.failure import is_collateral
from distributed.runtime.session import Session
from distributed.train.callbacks.before_calls import BeforeCalls
from distributed.train.callbacks.callback import HOOKS, Callback, is_ours, keyed, overrides
from distributed.train.callbacks.control import Control
from distributed.train.callbacks.trained import TrainedParameters
from distributed.train.checks.digest import digest
from distributed.train.progress import Progress
from distributed.train.resume.sharing import send_tree


class CallbackRequests(NamedTuple):
    """What callbacks of any rank have asked for."""

    stops: bool = False
    saves: bool = False
    retrains: bool = False  # parameters are frozen or unfrozen

    def joined(self, later: CallbackRequests) -> CallbackRequests:
        """With those of a later agreement."""
        return CallbackRequests(*(one or other for one, other in zip(self, later, strict=True)))


NOTHING = CallbackRequests()
_RATE = itemgetter("lr")
_STATE = ("state", "rates", "stopped", "trained")  # what a resumed run is compared by; beside it is what they have seen


class StopReason(NamedTuple):
    """Why a run ends, as the first rank has it that asked."""

    reason: str
    by: str  # the class of the callback, or a setting
    rank: int
    text: str = ""  # with where the run stood


class Callbacks:
    """Of one rank. Without any callback, every method returns at once."""

    def __init__(self, callbacks: Sequence[Callback], control: Control, session: Session) -> None:
        self._keyed, self.control, self._session = keyed(callbacks), control, session
        control.name(self._keyed)
        every = list(self._keyed.values())
        own = {hook: [callback for callback in every if overrides(callback, hook)] for hook in HOOKS}
        self._at = {hook: found for hook, found in own.items() if found}
        self._meeting = [callback for callback in every if overrides(callback, "meets_after")]
        self.follows_steps, self.adds_meetings = "on_step_end" in self._at, bool(self._meeting)
        # Those of the library freeze parameters only where ranks meet.
        self._may_retrain = any(not is_ours(callback) for callback in self._at.get("on_step_end", ()))
        self.stopped: StopReason | None = None
        self._loaded: Mapping[str, Any] = {}  # until the run begins
        self._trained_before: dict[str, bool] = {}  # what callbacks of the run that is resumed had frozen or unfrozen
        self._trained: TrainedParameters | None = None  # when it has begun
        self._kept: BeforeCalls | None = None  # before the calls that are made again where the world breaks
        self._rates: list[float] | None = None  # as a callback has set them last

    def begin(self, progress: Progress, *, has_state: bool) -> None:
        """The run stands at `progress`. `has_state`: it was resumed, or handed over."""
        if not self._keyed:
            return
        self.control.progress, self.control.is_resumed = progress, has_state
        self._trained = TrainedParameters(self.control.model)
        self.control.note_trainable()
        if has_state:
            self._trained.change(self._trained_before)
            self.call("on_load")
        self.call("on_fit_start")

    def call_anew(self, hook: str) -> bool:
        """Call what is called again where the world breaks before the next step, from the state as it is now.

        Whether there is anything to call.
        """
        self._hold()
        self.call(hook)
        return hook in self._at

    def epoch_ends(self, *, is_interrupted: bool) -> None:
        """Its steps are done; what follows is done again where the world breaks before the next epoch."""
        self.control.is_interrupted = is_interrupted
        self._hold()

    def _hold(self) -> None:
        if self._keyed and self._session.can_regroup:
            control = self.control
            self._kept = BeforeCalls(control, self.state())

    def call(self, hook: str, *given: Any) -> None:
        """Call the methods of this name, in the order of the callbacks."""
        called = self._at.get(hook)
        if called is None:
            return
        before = _rates_of(self.control)
        for callback in called:
            self._call(callback, hook, (self.control, *given))
        now = _rates_of(self.control)
        if now != before:
            self._rates = now

    def validation_ended(self, metrics: Mapping[str, float] | None) -> None:
        """None: a signal has cut it short, so nothing is measured: who began something with it ends that."""
        if metrics is not None:
            self.call("on_validation_end", metrics)
            return
        for callback in self._at.get("on_validation_end", ()):
            if callback in self._at.get("on_validation_start", ()):
                self._call(callback, "on_validation_end", (self.control, {}))

    def _call(self, callback: Callback, name: str, given: tuple[Any, ...]) -> None:
        self.control.caller = callback
        try:
            getattr(callback, name)(*given)
        except Exception as failed:
            self._explain(failed, callback, name)
            raise

    def _explain(self, failed: Exception, callback: Callback, name: str) -> None:
        """Raise what a failed call means, unless that says it itself."""
        kind, rank, step = type(callback).__name__, self.control.rank, self.control.step
        place = f"in {name} of {kind} on rank {rank}, after step {step}"
        if is_collateral(failed) or isinstance(failed, DistributedError):
            failed.add_note(place)
            return
        raise CallbackError(
            f"a callback failed {place}: {type(failed).__name__}: {failed}",
            why="a training does not continue without what its callbacks do",
            do="correct the callback, or leave it out",
        ) from failed

    def step_ended(self, *, meets: bool) -> bool:
        """After each step, if a callback follows them; whether a rank that is alone is to train other parameters."""
        self.call("on_step_end")
        return self._may_retrain and self.trains_others(meets=meets)

    def trains_others(self, *, meets: bool) -> bool:
        """Whether a rank that is alone is to train other parameters from here on; several agree where they meet."""
        if meets or self._trained is None or not self._trained.has_changed:
            return False
        if self._session.world_size > 1:
            raise CallbackError(
                f"requires_grad of parameters was changed after step {self.control.step}, where the ranks do not meet",
                why="from the next step on, all ranks must reduce the same gradients",
                do="change it in on_epoch_start, or let meets_after(step) of the callback be true for this step; "
                "in a loop of your own, before the pass over the training data",
            )
        return True

    def meets_after(self, step: int) -> bool:
        """Whether the ranks agree on requests after this step, too."""
        return any(callback.meets_after(step) for callback in self._meeting)

    def epoch_ended(self, metrics: dict[str, float]) -> dict[str, float]:
        """A whole epoch has ended: returns what they have logged, the same on all ranks. Every rank comes here."""
        if not self._keyed:
            return {}
        self.control.metrics = metrics
        self.call("on_epoch_end", metrics)
        logged, self.control.logged = self.control.logged, {}
        texts = self._session.gather_texts("numbers that callbacks log", json.dumps(logged))
        found = means([json.loads(text) for text in texts])
        taken = [name for name in found if name in metrics]
        if taken:
            raise CallbackError(
                f"a callback logs {taken[0]!r}, which is a metric of the run already",
                why="one of the two numbers would be lost",
                do=f"run.log('my_{taken[0]}', …)",
            )
        self.control.metrics = metrics | found
        return found

    def read(self, metrics: Mapping[str, float]) -> None:
        """The numbers of a step, as callbacks see them from then on."""
        if self._keyed:
            self.control.metrics = {**self.control.metrics, **metrics}
            self.control.loss = metrics.get("loss", self.control.loss)

    def agree(self, *, saves: bool = True) -> CallbackRequests:
        """What any rank's callbacks have asked for; every rank calls it after the same step. Unless it `saves`, what
        was asked of that is kept for later: what comes before a step is done again where a run resumes there."""
        if not self._keyed:
            return NOTHING
        control = self.control
        assert self._trained is not None
        asked = [int(bool(control.reason)), int(saves and control.saves), int(self._trained.has_changed)]
        shared = torch.tensor(asked, device=self._session.device)
        found = CallbackRequests(*map(bool, self._session.max("what callbacks ask for", shared).tolist()))
        control.saves = control.saves and not saves
        if found.stops and self.stopped is None:
            self.stopped = self._first_reason()
        if found.retrains:
            self._trained.agree(self._session)
        return found

    def stop(self, reason: StopReason) -> None:
        """The run ends for this reason, as it was reported."""
        self.stopped = reason

    def _first_reason(self) -> StopReason:
        control = self.control
        mine = json.dumps([control.reason, control.reason_by])
        for rank, text in enumerate(self._session.gather_texts("why callbacks stop", mine)):
            reason, by = json.loads(text)
            if reason:
                return StopReason(reason, by, rank)
        raise AssertionError("some rank has asked")

    def failed(self, error: BaseException) -> bool:
        """Call `on_exception`, each callback's, even if another one fails; whether all of them came through."""
        sound = True
        for callback in self._at.get("on_exception", ()):
            try:
                self._call(callback, "on_exception", (self.control, error))
            except Exception as more:  # noqa: BLE001 - the error that is under way is the one to report
                error.add_note(f"and then: {type(more).__name__}: {more}")
                sound = False
        return sound

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as this rank has it; {}: nothing."""
        if self._trained is None:
            return dict(self._loaded)
        states = {key: state for key, callback in self._keyed.items() if (state := _state_of(key, callback))}
        rates = self._rates if self._rates == _rates_of(self.control) else None
        if rates is not None and any(isinstance(rate, torch.Tensor) for rate in rates):
            rates = None  # a tensor may be the optimizer's own
        found: dict[str, Any] = {"state": states, "rates": rates, "stopped": list(self.stopped or ())}
        flags = {name: flag for name, flag in self._trained.changed.items() if name not in self.control.ever_frozen}
        found["trained"] = {"flags": flags, "by": self._users, "frozen": self.control.frozen} if flags else None
        return {name: value for name, value in found.items() if value}

    @property
    def _users(self) -> list[str]:
        return [name for name, callback in self._keyed.items() if not is_ours(callback)]

    def _seen(self) -> dict[str, Any]:
        """What they have been shown last, the same on all ranks."""
        return {"seen": {"loss": self.control.loss, "metrics": self.control.metrics}} if self._keyed else {}

    def held(self) -> dict[str, Any] | None:
        """The state to resume with where the world broke: what is called again then has not been called in it.

        Takes back what they did to the optimizer's options; None: they changed weights, of which nothing is kept.
        """
        kept, control = self._kept, self.control
        if kept is not None and kept.is_now:
            state = kept.take_back()
            return None if state is None else state | self._seen()
        asked = [control.reason, control.reason_by, control.saves]  # since the ranks met last
        return self.state() | self._seen() | ({"asked": asked} if any(asked) else {})

    def shared(self, *, is_compared: bool) -> dict[str, Any]:
        """The same on every rank, each of which comes here: rank 0's, unless they were compared before."""
        if self._trained is None:
            return {}
        state = self.state() if is_compared else send_tree(self._session, "state of callbacks", 0, self.state())
        return state | self._seen()

    def replicated(self) -> Iterator[tuple[str, str]]:
        """The state of each, which must be the same on all ranks."""
        for key, callback in self._keyed.items() if self._trained is not None else ():
            if state := _state_of(key, callback):
                yield f"callback {key}: its state()", digest(state)

    def load_state(self, saved: Mapping[str, Any], *, is_same_run: bool) -> None:
        """`is_same_run`: it is of this very run, whose world broke."""
        changed = saved.get("trained", {"flags": {}, "by": []})
        if self._keyed.keys() >= set(changed["by"]):
            self._trained_before = changed["flags"]
            self.control.take_frozen(changed.get("frozen", {}))
        is_theirs = not self._keyed.keys().isdisjoint((*saved.get("state", {}), *changed["by"]))
        self._loaded = {name: saved[name] for name in _STATE if name in saved} if is_theirs else {}
        if self._keyed and "seen" in saved:
            self.control.loss, self.control.metrics = saved["seen"]["loss"], dict(saved["seen"]["metrics"])
        for key, state in saved.get("state", {}).items():
            if key in self._keyed:
                self._call(self._keyed[key], "load_state", (state,))
        if is_same_run and saved.get("stopped"):
            self.stopped = StopReason(*saved["stopped"])
        if is_same_run and "asked" in saved:
            self.control.reason, self.control.reason_by, self.control.saves = saved["asked"]

    def unknown_in(self, saved: Mapping[str, Any]) -> list[str]:
        """What a checkpoint has of callbacks that this run does not have."""
        names = [name for name in saved.get("state", {}) if name not in self._keyed]
        found = [f"the checkpoint has the state of the callback {name}, which this run does not have" for name in names]
        if gone := set(saved.get("trained", {"by": ()})["by"]) - self._keyed.keys():
            missing = ", ".join(sorted(gone))
            found.append(f"requires_grad is as it was given, and not as callbacks had left it: {missing} are not there")
        return found

    def load_rates(self, saved: Mapping[str, Any]) -> None:
        """Rates that a callback has set, which the schedule does not know of; after the schedule is loaded."""
        rates, groups = saved.get("rates"), self.control.optimizer.param_groups
        if self._keyed and rates and len(rates) == len(groups):
            self._rates = rates
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def _rates_of(control: Control) -> list[float]:
    return list(map(_RATE, control.optimizer.param_groups))


def _state_of(key: str, callback: Callback) -> dict[str, Any]:
    state = callback.state()
    if not isinstance(state, dict):
        raise CallbackError(
            f"state() of the callback {key} returns a {type(state).__name__}",
            why="a checkpoint keeps names with numbers, texts and tensors",
            do="return a dict",
        )
    return state


def means(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each number's mean over the ranks that have logged it; one that is the same on all of them stays as it is.

    >>> means([{"gap": 0.1, "seconds": 2.0}, {"gap": 0.1}, {"gap": 0.1}])
    {'gap': 0.1, 'seconds': 2.0}
    """
    found: dict[str, list[float]] = {}
    for one in logged:
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return {n: v[0] if all(x == v[0] for x in v) else math.fsum(v) / len(v) for n, v in found.items()}
