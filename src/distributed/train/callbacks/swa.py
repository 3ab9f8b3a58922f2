"""SWA: stochastic weight averaging, the mean of the weights at the ends of the last epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.strategies.base import StepTask
from distributed.train.callbacks.averaging import WeightAveraging
from distributed.train.callbacks.callback import TrainingControl
from distributed.train.callbacks.statistics import has_statistics


@dataclass(eq=False)
class SWA(WeightAveraging):
    """The mean of the weights after each epoch from `start_epoch` on, the first being 0.

    With a `learning_rate`, the rates move from what they are in that epoch to this one over `anneal_epochs`, whatever
    the schedule says, and stay there. At the end BatchNorm's statistics are collected over the training data for the
    averaged weights, as `torch.optim.swa_utils.update_bn` does; with `evaluates`, also before each validation, which
    then runs with the averages. `trainer.averaged_model()` has the average after `fit`.

    >>> import torch
    >>> from distributed import Trainer
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> swa = SWA(start_epoch=2, learning_rate=0.05)
    >>> trainer = Trainer(nn.Linear(4, 2), callbacks=[swa], batch_size=16, epochs=4, progress=False)
    >>> history = trainer.fit(data, run_dir=tmp / "run")
    >>> swa.updates, trainer.averaged_model()
    (2, Linear(in_features=4, out_features=2, bias=True))
    """

    start_epoch: int
    learning_rate: float | None = None
    anneal_epochs: int = 10
    anneal: Literal["cos", "linear"] = "cos"
    evaluates: bool = False
    _from: list[float] = field(default_factory=list, init=False, repr=False)  # the rates before the first of its epochs

    def __post_init__(self) -> None:
        super().__init__()
        rate = self.learning_rate
        is_wrong = self.start_epoch < 0 or self.anneal_epochs < 0 or (rate is not None and not rate > 0)
        if is_wrong or self.anneal not in ("cos", "linear"):
            given = f"start_epoch={self.start_epoch}, learning_rate={rate}, anneal_epochs={self.anneal_epochs}"
            raise TaskError(
                f"SWA({given}, anneal={self.anneal!r})",
                why="epochs count from 0, a learning rate is above 0, and it is annealed as 'cos' or 'linear'",
                do="SWA(start_epoch=15, learning_rate=0.05)",
            )

    def check(self, plan: Plan, task: StepTask, evaluates: bool) -> list[Problem]:
        found = super().check(plan, task, evaluates)
        if self.start_epoch >= plan.epochs and not plan.is_dev_run:
            what = f"SWA(start_epoch={self.start_epoch}), and the run has epochs={plan.epochs}"
            do = f"SWA(start_epoch={max(0, plan.epochs * 3 // 4)})"
            found.append(Problem(what, why="epochs count from 0: nothing would be averaged", do=do))
        if plan.is_bitwise and has_statistics(task.model):
            what = "SWA of a model with BatchNorm, under reproducible='bitwise'"
            why = "its statistics are collected over whole batches, which virtual ranks never see"
            found.append(Problem(what, why=why, do="set reproducible='off', or use GroupNorm"))
        if plan.batch.of_stream and has_statistics(task.model):
            what = "SWA of a model with BatchNorm, trained from a stream"
            why = "its statistics are collected by one more pass over the data, which a stream may not allow"
            found.append(Problem(what, why=why, do="use a dataset with a length, or GroupNorm"))
        return found

    def share(self, run: TrainingControl) -> float | None:
        return 1 / (self.updates + 1) if run.is_last_step and run.epoch >= self.start_epoch else None

    def on_fit_start(self, run: TrainingControl) -> None:
        if not run.is_resumed:
            self._from = []
        super().on_fit_start(run)

    def on_epoch_start(self, run: TrainingControl) -> None:
        if self.learning_rate is not None and run.epoch >= self.start_epoch and not self._from:
            self._from = [float(group["lr"]) for group in run.optimizer.param_groups]
        self._set_rates(run)

    def on_step_end(self, run: TrainingControl) -> None:
        super().on_step_end(run)
        self._set_rates(run)

    def on_epoch_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None:
        if run.is_stream and run.epoch >= self.start_epoch:  # whose last step was not known to be one
            self.update(run, 1 / (self.updates + 1))

    def on_validation_start(self, run: TrainingControl) -> None:
        if self.evaluates:
            self._collect(run)
        super().on_validation_start(run)

    def on_fit_end(self, run: TrainingControl) -> None:
        if not run.is_interrupted:
            self._collect(run)

    def _set_rates(self, run: TrainingControl) -> None:
        for group, rate in zip(run.optimizer.param_groups, self._from, strict=False):
            assert self.learning_rate is not None
            share = _annealed(run.epoch - self.start_epoch, self.anneal_epochs, self.anneal)
            group["lr"] = self.learning_rate * share + rate * (1 - share)

    def _collect(self, run: TrainingControl) -> None:
        """BatchNorm's statistics for the averaged weights, kept with them."""
        copy = run.copy_of(self)
        if copy is None or not has_statistics(run.model):
            return
        self.put_in(run)
        run.collect_statistics()
        with run.weights() as live:
            for name, _ in run.model.named_buffers():
                if name in live:
                    copy[name].copy_(live[name])
        self.take_out(run)

    def state(self) -> dict[str, Any]:
        return super().state() | ({"from": self._from} if self._from else {})

    def load_state(self, state: dict[str, Any]) -> None:
        self.updates, self._from = state.get("updates", 0), list(state.get("from", []))


def _annealed(epochs: int, over: int, how: str) -> float:
    """How far the way has been gone after that many epochs.

    >>> _annealed(5, 10, "linear"), round(_annealed(5, 10, "cos"), 9), _annealed(0, 0, "cos")
    (0.5, 0.5, 1.0)
    """
    place = min(1.0, epochs / over) if over else 1.0
    return place if how == "linear" else (1 - math.cos(math.pi * place)) / 2
