"""Evaluation within a training: every validation sample once, over all ranks."""

from __future__ import annotations

import time

import torch

from distributed.core.protocol.heartbeat import Phase
from distributed.data.loading.loader import EvalLoader
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.session import Session
from distributed.runtime.shutdown import StopRequest
from distributed.strategies.base import Strategy
from distributed.train.checks.samples import SampleCheck
from distributed.train.metrics import MetricNames, MetricTotals
from distributed.train.run_events import RunEvents


class Evaluator:
    """The validation of one run on one rank. Every rank calls it after the same step."""

    def __init__(
        self,
        strategy: Strategy,
        session: Session,
        *,
        loader: EvalLoader | None,
        names: MetricNames,
        stop: StopRequest,
        heartbeat: Heartbeat,
        samples: SampleCheck,
        events: RunEvents,
    ) -> None:
        self._strategy, self._session, self._loader, self._names = strategy, session, loader, names
        self._stop, self._heartbeat, self._samples, self._events = stop, heartbeat, samples, events

    @property
    def has_data(self) -> bool:
        return self._loader is not None

    def evaluate(self, epoch: int, step: int) -> dict[str, float]:
        """Every validation sample once, over all ranks; the sums are added in one collective."""
        if self._loader is None:
            return {}
        with self._heartbeat.phase(Phase.EVALUATING):
            return self._evaluate_all(epoch, step, self._loader)

    def _evaluate_all(self, epoch: int, step: int, loader: EvalLoader) -> dict[str, float]:
        begun = time.perf_counter()
        self._strategy.train(False)
        totals, was_cut = MetricTotals(), False
        for batch, size in loader:
            if self._stop.received is not None and not self._strategy.lockstep_eval:
                was_cut = True
                break
            totals.add(self._strategy.eval_step(batch, size))
        metrics = totals.mean("validation metrics", self._session, self._names)
        cut = torch.tensor([int(was_cut)], device=self._session.device)
        self._strategy.train(True)
        is_cut_short = self._session.max("evaluation was cut short", cut).item()
        self._session.check()
        if is_cut_short:
            return {}
        self._samples.evaluated(loader)
        return self._events.evaluated(epoch, step, time.perf_counter() - begun, metrics)
