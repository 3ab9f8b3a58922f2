"""What short trials of a run measure: the loss at growing learning rates, and the memory that a rank takes."""

from __future__ import annotations

import json
import math
import resource

import torch

from distributed.core.atomic import write_private
from distributed.core.run_dir import RunDir
from distributed.train.callbacks.callback import Callback, TrainingControl

_DIVERGED = 4.0  # times the least loss
_SURE = 10  # steps after which a loss that grows so is taken for divergence


class RateSweep(Callback):
    """Learning rates from `low` to `high`, each step's as much larger as the last one's; stops where the loss explodes.

    Groups keep the ratio of their rates to that of the first.
    """

    def __init__(self, low: float, high: float, steps: int) -> None:
        self.rates = sweep(low, high, steps)
        self.losses: list[float] = []
        self._ratios: list[float] = []

    def on_fit_start(self, run: TrainingControl) -> None:
        groups = run.optimizer.param_groups
        first = float(groups[0]["lr"])
        self._ratios = [float(group["lr"]) / first if first else 1.0 for group in groups]
        self._set(run, self.rates[0])

    def on_epoch_start(self, run: TrainingControl) -> None:
        self._set(run, self.rates[min(run.step, len(self.rates) - 1)])  # a scheduler moves it where an epoch ends

    def on_step_end(self, run: TrainingControl) -> None:
        self._take_loss(run)
        if run.step < len(self.rates):
            self._set(run, self.rates[run.step])

    def on_fit_end(self, run: TrainingControl) -> None:
        self._take_loss(run)
        if run.is_main:
            known = min(len(self.losses), len(self.rates))
            found = {"rates": self.rates[:known], "losses": self.losses[:known]}
            write_private(RunDir(run.run_dir).probe(0), json.dumps(found))

    def meets_after(self, step: int) -> bool:
        return True

    def _take_loss(self, run: TrainingControl) -> None:
        """Of the step before: that of this one is not read yet."""
        loss = run.loss
        if loss is None:
            return
        self.losses.append(loss)
        least = min(value for value in self.losses if not math.isnan(value)) if not math.isnan(loss) else loss
        if not math.isfinite(loss) or (len(self.losses) > _SURE and loss > _DIVERGED * abs(least)):
            run.stop("the loss has diverged")

    def _set(self, run: TrainingControl, rate: float) -> None:
        for group, ratio in zip(run.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = rate * ratio


class MemoryPeak(Callback):
    """The most memory that each rank has taken, of its GPU or of the host."""

    def on_fit_start(self, run: TrainingControl) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def on_fit_end(self, run: TrainingControl) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            peak = torch.cuda.max_memory_reserved()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        write_private(RunDir(run.run_dir).probe(run.rank), json.dumps({"peak_bytes": peak}))


def sweep(low: float, high: float, steps: int) -> list[float]:
    """
    >>> [round(rate, 3) for rate in sweep(0.001, 1.0, 4)]
    [0.001, 0.01, 0.1, 1.0]
    """
    return [low * (high / low) ** (step / max(1, steps - 1)) for step in range(steps)]
