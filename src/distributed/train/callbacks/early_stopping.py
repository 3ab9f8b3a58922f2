"""EarlyStopping: the end of a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.core.values import parse_best
from distributed.strategies.base import StepTask
from distributed.train.callbacks.callback import Callback, TrainingControl


@dataclass(eq=False)
class EarlyStopping(Callback):
    """Ends a run when a metric of its epochs has not improved for `patience` of them, by more than `min_delta`.

    What is best is known of losses and accuracies; of other metrics, `mode` says it. A run that was stopped so and is
    resumed ends at once, unless it has more patience now.

    >>> import torch
    >>> from distributed import Trainer
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    >>> trainer = Trainer(nn.Linear(4, 2), callbacks=[stopping], batch_size=16, epochs=9, progress=False)
    >>> trainer.fit(data, data, run_dir=tmp / "run").stopped
    'stopped after epoch 2: val_loss has not improved for 1 epoch [EarlyStopping]'
    """

    metric: str = "val_loss"
    mode: Literal["auto", "min", "max"] = "auto"
    patience: int = 3
    min_delta: float = 0.0
    best: float | None = field(default=None, init=False)
    waited: int = field(default=0, init=False)  # epochs since the best

    def __post_init__(self) -> None:
        if self.patience < 1 or not self.min_delta >= 0:
            raise TaskError(
                f"EarlyStopping(patience={self.patience}, min_delta={self.min_delta})",
                why="patience is a number of epochs, at least 1, and min_delta a difference, at least 0",
                do="EarlyStopping(patience=3)",
            )
        try:
            self._sign = {"min": 1, "max": -1}[parse_best(self._wanted)[0]]
        except ValueError:
            raise TaskError(
                f"EarlyStopping({self.metric!r}, mode={self.mode!r})",
                why=f"whether the least or the most {self.metric} is best is not known",
                do=f"EarlyStopping({self.metric!r}, mode='min') or mode='max'",
            ) from None

    @property
    def _wanted(self) -> str:
        return self.metric if self.mode == "auto" else f"{self.mode}:{self.metric}"

    def check(self, plan: Plan, task: StepTask, evaluates: bool) -> list[Problem]:
        if evaluates or not self.metric.startswith("val_"):
            return []
        do = f"fit(train_loader, val_loader), or EarlyStopping({self.metric.removeprefix('val_')!r})"
        return [
            Problem(f"EarlyStopping({self.metric!r}), and nothing is validated", why="fit has no val_loader", do=do)
        ]

    def on_fit_start(self, run: TrainingControl) -> None:
        if not run.is_resumed:
            self.best, self.waited = None, 0
        self._stop_if_over(run)

    def on_epoch_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            if self.metric.startswith("val_") and not any(name.startswith("val_") for name in metrics):
                return  # a signal has cut the evaluation short
            raise TaskError(
                f"EarlyStopping({self.metric!r}), and the run does not measure it",
                why=f"the metrics of this epoch are {', '.join(sorted(metrics))}",
                do=f"EarlyStopping({min(metrics, default='loss')!r}), or metrics={{{self.metric!r}: …}}",
            )
        value = metrics[self.metric]
        is_first = self.best is None and not math.isnan(value)
        if is_first or (self.best is not None and self._sign * (self.best - value) > self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._stop_if_over(run)

    def _stop_if_over(self, run: TrainingControl) -> None:
        if self.waited >= self.patience:
            epochs = f"{self.waited} epoch{'s' * (self.waited > 1)}"
            run.stop(f"{self.metric} has not improved for {epochs}")

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
