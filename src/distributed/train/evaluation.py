"""Evaluation: every sample of one or several sets once, over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch

from distributed.checkpoint.restore.rng import restore_rng, rng_state
from distributed.core.errors import TaskError
from distributed.core.protocol.heartbeat import Phase
from distributed.data.loading.loader import EvalLoader
from distributed.data.named_sources import prefix_of
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.session import Session
from distributed.runtime.shutdown import StopRequest
from distributed.strategies.base import Strategy
from distributed.strategies.model.buffer_snapshot import kept_buffers
from distributed.train.checks.samples import SampleCheck
from distributed.train.metrics import MetricNames, MetricTotals
from distributed.train.run_events import RunEvents
from distributed.train.task import Task
from distributed.train.whole_set.metrics import WholeSetMetrics

Loaders = Mapping[str, EvalLoader]  # by the names of their sets; "": the only one


class SetMeasure:
    """Measures a model on sets. Every rank calls it at the same time."""

    def __init__(
        self,
        strategy: Strategy,
        session: Session,
        *,
        names: MetricNames,
        whole_set: WholeSetMetrics,
        on_read: Callable[[EvalLoader], None] = lambda loader: None,
        is_cut: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_read`: after each set, on all ranks. `is_cut`: whether this rank would end before the last batch."""
        self._strategy, self._session, self._names, self._whole_set = strategy, session, names, whole_set
        self._on_read, self._is_cut = on_read, is_cut

    def run(self, loaders: Loaders) -> dict[str, float] | None:
        """The metrics of all sets; None: some rank has ended before the last batch."""
        self._strategy.train(False)
        try:
            found: dict[str, float] = {}
            for name, loader in loaders.items():
                measured = self._measure(self._settled(loader))
                if measured is None:
                    return None
                self._on_read(loader)
                _add(found, prefix_of(name), measured)
            return found
        finally:
            self._whole_set.reset()  # and free what it holds

    def sanity_check(self, loaders: Loaders, batches: int) -> dict[str, float]:
        """The metrics of the first batches of each set, without those of the whole set."""
        self._strategy.train(False)
        found: dict[str, float] = {}
        for name, loader in loaders.items():
            totals = MetricTotals()
            for batch, size in islice(loader, batches):
                totals.add(self._strategy.eval_step(batch, size))
            _add(found, prefix_of(name), totals.mean("metrics of the first batches", self._session, self._names))
        self._whole_set.reset()
        return found

    def _measure(self, batches: Iterator[tuple[Any, int]]) -> dict[str, float] | None:
        totals, was_cut = MetricTotals(), False
        self._whole_set.reset()
        for batch, size in batches:
            if self._is_cut():
                was_cut = True
                break
            totals.add(self._strategy.eval_step(batch, size))
        metrics = totals.mean("validation metrics", self._session, self._names)
        cut = torch.tensor([int(was_cut)], device=self._session.device)
        is_cut_short = self._session.max("evaluation was cut short", cut).item()
        self._session.check()
        return None if is_cut_short else metrics | self._whole_set.compute(self._session)

    def _settled(self, loader: EvalLoader) -> Iterator[tuple[Any, int]]:
        """The batches of a set, of which the first may have to show what the loss is a mean over."""
        batches = iter(loader)
        first = next(batches, None)
        batch, size = (None, 0) if first is None else first
        self._strategy.settle_evaluation(batch, size)
        return batches if first is None else chain([first], batches)


class Evaluator:
    """The validation of one run on one rank. Every rank calls it after the same step."""

    def __init__(
        self,
        strategy: Strategy,
        session: Session,
        *,
        loaders: Loaders,
        names: MetricNames,
        task: Task,
        stop: StopRequest,
        heartbeat: Heartbeat,
        samples: SampleCheck,
        events: RunEvents,
    ) -> None:
        self._strategy, self._loaders, self._heartbeat, self._events = strategy, loaders, heartbeat, events
        self._session, self._task = session, task
        self._measure = SetMeasure(
            strategy,
            session,
            names=names,
            whole_set=task.whole_set,
            on_read=samples.evaluated,
            is_cut=lambda: stop.received is not None and not strategy.lockstep_eval,
        )

    @property
    def has_data(self) -> bool:
        return bool(self._loaders)

    def evaluate(self, epoch: int, step: int, *, within_epoch: bool) -> dict[str, float] | None:
        """Every validation sample once, over all ranks; None: a stop has cut it short, which all ranks know."""
        begun = time.perf_counter()
        with self._heartbeat.phase(Phase.EVALUATING):
            metrics = self._measure.run(self._loaders)
            self._strategy.train(True)
        if metrics is None:
            return None
        seconds = time.perf_counter() - begun
        return self._events.evaluated(epoch, step, seconds, metrics, within_epoch=within_epoch)

    def sanity_check(self, batches: int) -> dict[str, float]:
        """The metrics of a few batches, before a run begins: nothing is left of it but the errors that it finds.

        What a dataset keeps for itself is not taken back. Nothing is tried where a step may keep what cannot be.
        """
        with self._task.unchanged() as is_possible:
            keeps = torch.tensor(int(not is_possible), device=self._session.device)
            if self._session.max("whether validation cannot be tried", keeps).item():
                return {}
            return self._try_batches(batches)

    def _try_batches(self, batches: int) -> dict[str, float]:
        session, model = self._session, self._task.model
        rng = rng_state(session.device)
        loaders = {name: loader for name, loader in self._loaders.items() if not loader.is_read_once}
        try:
            with self._heartbeat.phase(Phase.EVALUATING), kept_buffers(model):
                found = self._measure.sanity_check(loaders, batches)
                self._strategy.train(True)
        finally:
            restore_rng(rng, session.device)
        return {f"val_{name}": value for name, value in found.items()}


def _add(found: dict[str, float], prefix: str, metrics: Mapping[str, float]) -> None:
    for metric, value in metrics.items():
        if prefix + metric in found:
            raise TaskError(
                f"two metrics of the validation are called val_{prefix}{metric}",
                why="the names of two sets and their metrics come to the same",
                do="rename one of the loaders, or one of the metrics",
            )
        found[prefix + metric] = value
