"""Pipelined: the step of ranks that each hold a stage of the model; the last stage has the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.strategies.base import MetricSum, Outcome, StepOutput, add_sums
from distributed.strategies.data_parallel.whole_batch import NoWholeBatch, PartsOfBatch, WholeBatch
from distributed.strategies.pipeline.schedule import Pipeline, Run
from distributed.strategies.sharded import Sharded
from distributed.strategies.steps.microbatches import Passed


class Pipelined(Sharded):
    """Forward and backward of all micro-batches of a step are the pipeline's schedule."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._is_weighted: bool | None = None  # whether the loss is a mean over other things than samples

    @property
    def _pipeline(self) -> Pipeline:
        assert self._shards.pipeline is not None
        return self._shards.pipeline

    def _share_batch(self) -> WholeBatch | None:
        return NoWholeBatch(normalizes=self._normalizes) if self._ranks > 1 else PartsOfBatch()

    def _whole_step(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """Run the micro-batches through a pipeline, whose last stage has the loss."""
        losses: list[torch.Tensor | float] = []
        weights: list[torch.Tensor] = []
        metrics: dict[str, MetricSum] = {}  # of the whole batch, independent of its micro-batches

        def weigh(index: int, outcome: Outcome) -> torch.Tensor:
            part = self._part_of(microbatches[index], outcome)
            losses.append(self._value_of(part))
            if outcome.weight is not None:
                weights.append(outcome.weight.detach() * bool(microbatches[index].size))
            if measure and microbatches[index].size:
                add_sums(metrics, self._task.measure(outcome, microbatches[index].size))
            return part if self._scaler is None else self._scaler.scale(part)

        device = self._session.device
        if not self._is_settled:
            self._settle_stages(microbatches[0])
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=device))  # creates the scale on ranks without a loss
        batches = [self.moved(micro.batch) for micro in microbatches]
        watched = nullcontext() if self._changes is None else self._watched_changes()
        looked_at = self.forward_watch or nullcontext()
        with watched, looked_at, self._autocast or nullcontext(), self._whole_batch or nullcontext():
            self._pipeline.forward_backward(batches, self._watched(self._task.run), weigh)
        self.clock.mark()
        if self._is_weighted is None:
            is_weighted = torch.tensor([int(bool(weights))], device=device)
            self._is_weighted = bool(self._session.max("whether the loss has weights", is_weighted).item())
        total = sum(weights, torch.zeros((), device=device)) if self._is_weighted else None
        if measure:
            self.check_targets()
        return self._finish_step(Passed(sum(losses, 0.0), total, metrics if measure else None), measure)

    def _settle_stages(self, micro: Microbatch) -> None:
        """Settle the loss by one more pass, as in an evaluation, because only the last stage has an outcome."""
        batch = self.moved(micro.batch)
        devices = [self._session.device] if self._session.device.type == "cuda" else []
        self.train(False)
        eager = torch.compiler.set_stance("force_eager") if self._own_use is not None else nullcontext()
        with torch.random.fork_rng(devices=devices), torch.no_grad(), self._autocast or nullcontext(), eager:
            outcome = self._pipeline.forward(batch, self._watched(self._task.run))
        self.train(True)
        torch.clear_autocast_cache()
        self._is_settled = True
        self._task.settle(outcome, batch, micro.size, self._trial())

    def _evaluated(self, batch: Any) -> Outcome | None:
        self._verify_evaluation(batch)
        return self._through(batch, self._task.evaluate)

    def _collect(self, batch: Any) -> None:
        with self._autocast or nullcontext():
            self._pipeline.forward(batch, self._watched(self._task.run))

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]:
        outcome = self._through(batch, self._task.evaluate)
        return {} if outcome is None or not self.owns_metrics else self._measured(outcome, size)

    def predict_step(self, batch: Any) -> Any:
        self._verify_prediction(batch)

        def predict(model: nn.Module, moved: Any) -> Outcome:
            return Outcome(torch.zeros((), device=self._session.device), self._task.predict(model, moved), None)

        outcome = self._through(batch, predict)
        return outcome.outputs if outcome is not None and self.owns_metrics else None

    def _through(self, batch: Any, run: Run) -> Outcome | None:
        """A batch without gradients; only the ranks of the last stage have the outcome."""
        with torch.no_grad(), self._autocast or nullcontext():
            return self._pipeline.forward(self.moved(batch), self._watched(run))

    def _watched(self, run: Run) -> Run:
        """A pipeline's run, watched for what it computes of parameters, unless it is compiled."""
        own_use = self._own_use
        if own_use is None or (self._plan.memory.compile and torch.is_grad_enabled()):
            return run

        def watched(model: nn.Module, batch: Any) -> Outcome:
            with own_use.watching(run.__name__):
                return run(model, batch)

        return watched
