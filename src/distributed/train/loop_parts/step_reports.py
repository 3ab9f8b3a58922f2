"""StepReports: what a run says of its steps where it reads their numbers, and which ranks are slow."""

from __future__ import annotations

import time
from collections.abc import Callable

from distributed.core.events import StepEnded
from distributed.strategies.base import Strategy
from distributed.train.meter import Reading
from distributed.train.run_events import RunEvents
from distributed.train.stragglers.delay import Reader
from distributed.train.stragglers.stragglers import Stragglers

_QUICK_S = 1e-3  # steps that are shorter than this, if graphs take them
_LATER = 8  # are reported that many steps later, when the device has enough to do


class StepReports:
    """Of one rank. Only rank 0 has observers; each hears of the paces, by which it may be replaced."""

    def __init__(
        self, events: RunEvents, strategy: Strategy, *, utilization: Callable[[], float | None], on_paces: Reader
    ) -> None:
        self._events, self._strategy = events, strategy
        self._utilization, self._on_paces = utilization, on_paces
        self._stragglers = Stragglers()
        self.due_at = 0  # the step after which delayed events are reported

    def log(self, reading: Reading, *, epoch: int, step: int, is_captured: bool) -> None:
        self._on_paces(reading.paces, step, reading.step_s)
        if not self._events.is_heard:
            return
        metrics, communication = dict(reading.metrics), reading.communication
        is_quick = is_captured and reading.step_s < _QUICK_S
        tell, self.due_at = self._events.tell_later if is_quick else self._events.tell, step + _LATER
        tell(
            StepEnded(
                time=time.time(),
                step=step,
                epoch=epoch,
                loss=metrics.pop("loss"),
                learning_rate=float(self._strategy.optimizer.param_groups[0]["lr"]),
                samples_per_second=reading.samples_per_second,
                gradient_norm=reading.gradient_norm,
                device_utilization=self._utilization(),
                communication_seconds=None if communication is None else communication.seconds,
                communication_hidden=None if communication is None else communication.hidden,
                metrics=metrics,
            )
        )
        for slow in self._stragglers.look(reading.paces, step=step, step_s=reading.step_s, time=time.time()):
            tell(slow)
