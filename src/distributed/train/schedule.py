"""The learning rate over a run: warm-up and decay as a function of the step, or the user's own scheduler."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch

from distributed.core.plan import SchedulePlan
from distributed.core.rates import rate_factor, warmup_steps
from distributed.train.given_schedulers import make


class Schedule(Protocol):
    """Called after every step and epoch, it sets the next learning rate."""

    name: str  # of the user's scheduler; "": the plan's own

    def step_ended(self, step: int) -> None: ...

    def epoch_ended(self, metrics: dict[str, float]) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any], step: int) -> None: ...


class PlannedSchedule:
    """A function of the step alone, so a resumed run needs no state of it."""

    name = ""

    def __init__(
        self, plan: SchedulePlan, optimizer: torch.optim.Optimizer, steps_per_epoch: int | None, total: int | None
    ) -> None:
        self._plan, self._optimizer, self._total = plan, optimizer, total
        self._warmup = warmup_steps(plan, steps_per_epoch, total)
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._moves = not plan.is_constant
        self.step_ended(0)

    def step_ended(self, step: int) -> None:
        if self._moves:
            factor = rate_factor(self._plan, step, self._warmup, self._total)
            for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * factor

    def epoch_ended(self, metrics: dict[str, float]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"peaks": list(self._peaks)}

    def load_state(self, state: dict[str, Any], step: int) -> None:
        self._peaks = list(state["peaks"])
        self.step_ended(step)


class UserSchedule:
    """A torch scheduler, stepped every epoch or every step; one that wants a metric gets the validation loss."""

    def __init__(self, scheduler: Any, interval: str) -> None:
        self._scheduler, self._every_step = scheduler, interval == "step"
        self.name = type(scheduler).__name__
        self._wants_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def step_ended(self, step: int) -> None:
        if self._every_step and step:
            self._scheduler.step()

    def epoch_ended(self, metrics: dict[str, float]) -> None:
        if self._every_step:
            return
        with warnings.catch_warnings():  # one that was sent to this rank does not know that the optimizer has stepped
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
            if not self._wants_metric:
                self._scheduler.step()
            elif "val_loss" in metrics or "loss" in metrics:
                self._scheduler.step(metrics["val_loss"] if "val_loss" in metrics else metrics["loss"])

    def state(self) -> dict[str, Any]:
        return dict(self._scheduler.state_dict())

    def load_state(self, state: dict[str, Any], step: int) -> None:
        self._scheduler.load_state_dict(state)


def make_schedule(
    scheduler: Any, plan: SchedulePlan, optimizer: torch.optim.Optimizer, steps_per_epoch: int | None, total: int | None
) -> Schedule:
    """`scheduler` is a scheduler of this optimizer, a function that makes one of it, or None for the plan's own."""
    if scheduler is None:
        return PlannedSchedule(plan, optimizer, steps_per_epoch, total)
    return UserSchedule(make(scheduler, optimizer), plan.interval)
