"""EvaluationStep: a batch without gradients, for its metrics or its predictions, and the modes of the model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from distributed.core.plan import Decision
from distributed.data.loading.transfer import to_device
from distributed.strategies.base import LossTrial, MetricSum, Outcome
from distributed.strategies.model.buffer_snapshot import BufferSnapshot
from distributed.strategies.model.modes import KeptModes
from distributed.strategies.steps.settling import LossSettling


def unless_empty(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The loss with 0 for the mean over nothing, which is NaN in torch and has no weight."""
    return torch.where(weight > 0, loss, loss.nan_to_num(0.0))


def idle_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Of a run that trains nothing: it is never stepped and holds no state."""
    return torch.optim.SGD([*module.parameters()] or [nn.Parameter(torch.zeros(0))], lr=0.0)


class EvaluationStep(LossSettling):
    """The part of a strategy that trains nothing."""

    owns_metrics = True
    lockstep_eval = False
    decisions: list[Decision]
    _until_closed: ExitStack
    _model: nn.Module  # the module that training calls
    _moves: bool  # whether reading a value would wait or fail
    _loss_before: BufferSnapshot | None = None  # the loss's buffers when an evaluation began
    _settled_by_evaluation = False

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]:
        self._task.samples = size
        with torch.no_grad():
            outcome = self._call(self._task.evaluate, self.module, self.moved(batch))
        return self._measured(outcome, size)

    def predict_step(self, batch: Any) -> Any:
        """The predictions of this rank's batch."""
        with torch.no_grad():
            return self._call(self._task.predict, self.module, self.moved(batch))

    def settle_evaluation(self, batch: Any, size: int) -> None:
        """Find out what the loss is a mean over, where no step has; every rank must call it, with its first batch.

        None: this rank has none. A first step finds it out again, for its own batches.
        """
        if self._is_settled or self._settled_by_evaluation or self._task.has_own_validation:
            return
        self._settled_by_evaluation = True
        self._task.samples = size
        batch = None if batch is None else self.moved(batch)
        with torch.no_grad():
            outcome = None if batch is None else self._evaluated(batch)
        self._task.settle(outcome, batch, size, self._trial_of_evaluation())

    def _trial_of_evaluation(self) -> LossTrial:
        trial = self._trial()
        return trial._replace(run=None if trial.run is None else self._try_evaluation)

    def _evaluated(self, batch: Any) -> Outcome | None:
        """The outcome of a batch on this device; None: another rank has it."""
        return self._call(self._task.evaluate, self.module, batch)

    def _try_evaluation(self, batch: Any) -> Outcome:
        return self._try(batch, self._task.evaluate)

    def moved(self, batch: Any) -> Any:
        """A batch on this rank's device."""
        return to_device(batch, self._session.device) if self._moves else batch

    def _measured(self, outcome: Outcome, size: int) -> Mapping[str, MetricSum]:
        """The metric sums of an evaluation's batch; none for a stand-in."""
        if not size:
            return {}
        with torch.no_grad():
            weight: torch.Tensor | float = float(size) if outcome.weight is None else outcome.weight
            value = outcome.loss if outcome.weight is None else unless_empty(outcome.loss, outcome.weight)
            loss = MetricSum(value.double() * (1.0 if outcome.is_sum else weight), weight)
            if self._is_settled or self._settled_by_evaluation or self._task.has_own_validation:
                self._task.check_evaluated(outcome)
            if self.owns_metrics:
                self._task.collect(outcome)
            return {"loss": loss} | self._task.measure(outcome, size)

    def _keep_modes(self) -> None:
        """Note which modules stay in eval mode; the user's model has its modes again in the end."""
        self._modes = KeptModes(self.module)
        self.decisions += self._modes.decisions()
        self._until_closed.callback(self._modes.restore, self.module)

    def train(self, mode: bool) -> None:
        """Switch modes; an evaluation must not change the loss's buffers, as its batches differ between ranks."""
        self._model.train(mode)
        if mode:
            self._modes.keep(self.module)
        loss = self._loss
        if loss is None:
            return
        if not mode and self._loss_before is None:
            self._loss_before = BufferSnapshot(loss)
        elif mode and self._loss_before is not None:
            self._loss_before.restore()
            self._loss_before = None
