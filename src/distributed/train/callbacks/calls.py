"""Callbacks: the calls of a run's callbacks, and what they have asked for, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.core.protocol.failure import is_collateral
from distributed.runtime.session import Session
from distributed.strategies.base import Strategy
from distributed.train.callbacks.callback import HOOKS, Callback
from distributed.train.progress import Progress


class CallbackRequests(NamedTuple):
    """What callbacks of any rank have asked for."""

    stops: bool = False
    saves: bool = False


NOTHING = CallbackRequests()


class Control:
    """What callbacks see of a run, and what they ask of it; implements `TrainingControl`."""

    def __init__(self, plan: Plan, strategy: Strategy, session: Session, model: nn.Module) -> None:
        self._strategy, self.model = strategy, model
        self.rank, self.world_size, self.run_dir = session.rank, session.world_size, plan.run_dir
        self.max_epochs = plan.epochs
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.reason = ""
        self.saves = False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._strategy.optimizer

    @property
    def epoch(self) -> int:
        return self.progress.epoch

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def log(self, name: str, value: float) -> None:
        self.logged[name] = float(value)

    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason

    def save(self) -> None:
        self.saves = True


class Callbacks:
    """Of one rank. Without any callback, every method returns at once."""

    def __init__(self, callbacks: Sequence[Callback], control: Control, session: Session) -> None:
        self._all, self.control, self._session = tuple(callbacks), control, session
        own = {hook: [c for c in self._all if _overrides(c, hook)] for hook in HOOKS}
        self._at = {hook: found for hook, found in own.items() if found}
        self.follows_steps = "on_step_end" in self._at

    def begin(self, progress: Progress, *, has_state: bool) -> None:
        """The run stands at `progress`. `has_state`: it was resumed, or handed over."""
        self.control.progress = progress
        if has_state:
            self.call("on_load")
        self.call("on_fit_start")

    def epoch_ended(self, metrics: dict[str, float]) -> dict[str, float]:
        """Call them; returns what they have logged."""
        if not self._all:
            return {}
        self.control.metrics = metrics
        self.call("on_epoch_end", metrics)
        logged, self.control.logged = self.control.logged, {}
        return logged

    def call(self, hook: str, *given: Any) -> None:
        for callback in self._at.get(hook, ()):
            try:
                getattr(callback, hook)(self.control, *given)
            except Exception as failed:
                if is_collateral(failed):
                    raise
                raise TaskError(
                    f"the callback {type(callback).__name__} failed in {hook}: {type(failed).__name__}: {failed}",
                    why="a training does not continue without what its callbacks do",
                    do="correct the callback, or leave it out",
                ) from failed

    def agree(self) -> CallbackRequests:
        """What any rank's callbacks have asked for; every rank calls it after the same step."""
        if not self._all:
            return NOTHING
        mine = torch.tensor([int(bool(self.control.reason)), int(self.control.saves)], device=self._session.device)
        stops, saves = self._session.max("what callbacks ask for", mine).tolist()
        self.control.saves = False
        return CallbackRequests(bool(stops), bool(saves))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, by place and class."""
        found = {_key(at, callback): callback.state() for at, callback in enumerate(self._all)}
        return {key: state for key, state in found.items() if state}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        for at, callback in enumerate(self._all):
            if (state := saved.get(_key(at, callback))) is not None:
                callback.load_state(state)


def _key(at: int, callback: Callback) -> str:
    return f"{at}-{type(callback).__name__}"


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook, None) is not getattr(Callback, hook)
