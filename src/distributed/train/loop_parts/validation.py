"""Validation: the evaluations of a run, at ends of epochs and within them, their records, and its sanity check.

before the first step   a few batches, whose numbers are dropped: a step that fails is found before an epoch is lost
within an epoch         by val_check_interval: every n steps, parts of an epoch, or minutes
at the end of an epoch  unless the interval says otherwise; always at the end of the run
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from distributed.core.history import EvaluationRecord
from distributed.core.plan import Plan
from distributed.data.named_sources import prefix_of
from distributed.runtime.shutdown import StopRequest
from distributed.train.callbacks.calls import Callbacks
from distributed.train.evaluation import Evaluator, Loaders
from distributed.train.loop_parts.turns import Turn
from distributed.train.meter import Meter
from distributed.train.progress import Due
from distributed.train.schedule import check_measured
from distributed.train.state import BEGINNING, RunState
from distributed.train.whole_set.metrics import WholeSetMetrics


class Validation:
    """Of one rank. Every rank makes every call after the same step."""

    def __init__(
        self,
        plan: Plan,
        evaluator: Evaluator,
        state: RunState,
        *,
        due: Due,
        meter: Meter,
        stop: StopRequest,
        callbacks: Callbacks,
        whole_set: list[str],
        on_returned: Callable[[], None],
    ) -> None:
        """`whole_set`: the names of metrics that may have several values. `on_returned`: when steps follow again."""
        self._evaluator, self._state, self._due, self._meter = evaluator, state, due, meter
        self._stop, self._callbacks, self._on_returned = stop, callbacks, on_returned
        self._sanity_batches, self._whole_set = plan.validation.sanity_batches, tuple(whole_set)
        self._named = {"keep_best": plan.checkpoint.best.partition(":")[2], "scheduler_metric": plan.schedule.metric}

    @property
    def has_data(self) -> bool:
        return self._evaluator.has_data

    def turn(self, epoch: int, *, within_epoch: bool = False) -> Generator[Turn, Any, float]:
        """The turn of an evaluation, and its record; returns how long it took."""
        begun, progress = time.perf_counter(), self._state.progress
        metrics = yield Turn(None, epoch=epoch, within_epoch=within_epoch)
        seconds = time.perf_counter() - begun
        if metrics:
            progress.end_evaluation()
            self._state.evaluations.append(EvaluationRecord(progress.step, epoch, seconds, dict(metrics)))
        self._due.evaluated()
        if within_epoch:
            self._meter.pause(seconds)
            self._on_returned()
        return seconds

    def measured_in(self, epoch: int, step: int | None = None) -> dict[str, float]:
        """The newest metrics of an epoch, or those measured after this step of it; {}: there are none."""
        last = self._state.evaluations[-1] if self._state.evaluations else None
        if last is None or last.epoch != epoch or step not in (None, last.step):
            return {}
        return dict(last.metrics)

    def evaluate(self, turn: Turn) -> dict[str, float]:
        """The answer to an evaluation's turn."""
        if not self.has_data:
            return {}
        self._callbacks.call("on_validation_start")
        metrics = self._evaluator.evaluate(turn.epoch, self._state.progress.step, within_epoch=turn.within_epoch)
        self._callbacks.validation_ended(metrics)
        if metrics is None:
            self._stop.end_here()
        return metrics or {}

    def sanity_check(self) -> None:
        """A few batches before the first step of a new run: what fails in them fails now."""
        if not self._sanity_batches or self._state.source != BEGINNING or not self.has_data:
            return
        measured = dict.fromkeys(self._whole_set, 0.0) | self._evaluator.sanity_check(self._sanity_batches)
        self._check_names(measured)

    def check(self, metrics: Mapping[str, float]) -> None:
        """At the end of an epoch, with all that was measured in it."""
        self._check_names(metrics, also_training=True)

    def _check_names(self, metrics: Mapping[str, float], *, also_training: bool = False) -> None:
        """Raise where a setting names a metric that is not measured."""
        for setting, metric in self._named.items():
            is_open = metric.startswith(self._whole_set)  # of a whole-set metric, whose values are not known yet
            if metric and (also_training or (metric.startswith("val_") and not is_open)):
                check_measured(metric, metrics, setting)


def names_of(whole_set: WholeSetMetrics, loaders: Loaders) -> list[str]:
    """The names of whole-set metrics in a history, or what they begin with."""
    return [f"val_{prefix_of(of)}{name}" for of in loaders for name in whole_set.names]
