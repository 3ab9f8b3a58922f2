"""Steering: what may end a run, have it saved or change what it trains beside its steps, agreed over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.train.callbacks.calls import CallbackRequests, Callbacks, StopReason
from distributed.train.meter import Meter, Reading
from distributed.train.progress import Due
from distributed.train.run_events import RunEvents
from distributed.train.state import RunState


class Steering:
    """Of one rank: its callbacks and rank 0's clock. Where it says so, every rank calls it after the same step."""

    def __init__(
        self,
        plan: Plan,
        session: Session,
        callbacks: Callbacks,
        *,
        meter: Meter,
        state: RunState,
        due: Due,
        events: RunEvents,
        on_retrained: Callable[[], None],
        on_called: Callable[[], None],
    ) -> None:
        """`on_retrained`: when other parameters are trained than before. `on_called`: callbacks ran between steps."""
        self._plan, self._session, self._callbacks, self._meter = plan, session, callbacks, meter
        self._state, self._due, self._events = state, due, events
        self._on_retrained, self._on_called = on_retrained, on_called

    @property
    def stopped(self) -> StopReason | None:
        """Why the run ends before its last epoch; None: nobody has asked for it."""
        return self._callbacks.stopped

    def read(self) -> Reading:
        """The numbers since the last reading, which callbacks see from then on. Every rank calls it."""
        reading = self._meter.read()
        self._callbacks.read(reading.metrics)
        return reading

    def agree(self, *, is_whole: bool = False, saves: bool = True) -> CallbackRequests:
        """What the callbacks of all ranks ask for; every rank calls it. `is_whole`: at the end of an epoch. `saves`:
        what was asked of that is answered now, else later."""
        callbacks, had = self._callbacks, self._callbacks.stopped
        asked = callbacks.agree(saves=saves)
        if asked.retrains:
            self._on_retrained()
        if had is None and callbacks.stopped is not None:
            self._stop(callbacks.stopped, is_whole=is_whole)
        return asked

    def step_ended(self, *, meets: bool) -> None:
        """Let callbacks follow a step. `meets`: the ranks agree after it."""
        if self._callbacks.step_ended(meets=meets):
            self._on_retrained()
        else:
            self._on_called()

    def time_is_over(self) -> bool:
        """Whether the run ends by the clock, which is reported; every rank calls it."""
        if not self._due.time_is_over(self._state.time.seconds, self.first_decides):
            return False
        reason = StopReason(f"it has trained for max_time={self._plan.settings['max_time']}", "max_time", 0)
        self._stop(reason, is_whole=False)
        return True

    def _stop(self, reason: StopReason, *, is_whole: bool) -> None:
        self._callbacks.stop(self._events.run_stopped(self._state.progress, reason, is_whole=is_whole))

    def first_decides(self, is_due: bool) -> bool:
        """Rank 0's clock decides for all, at the steps where they meet anyway."""
        own = torch.tensor([int(self._session.is_main and is_due)], device=self._session.device)
        return bool(self._session.max("time on rank 0's clock", own).item())
