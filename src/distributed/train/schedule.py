"""The learning rate over a run: warm-up and decay as a function of the step, or the user's own scheduler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from distributed.core.errors import TaskError
from distributed.core.plan import SchedulePlan
from distributed.core.rates import rate_factor, warmup_steps
from distributed.core.registry import nearest_hint
from distributed.strategies.joint_optimizer import JointOptimizer, OptimizerSetup
from distributed.train.given.schedulers import make

OF_OPTIMIZERS = "of_optimizers"  # in a schedule's state: the states of several schedulers, by the optimizers' names


@runtime_checkable
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
    """A torch scheduler, stepped every epoch or every step.

    One that wants a metric is stepped at the end of each epoch in which that was measured.
    """

    def __init__(self, scheduler: Any, interval: str, metric: str = "loss") -> None:
        self._scheduler, self._every_step, self._metric = scheduler, interval == "step", metric
        self.name = type(scheduler).__name__
        self._wants_metric = wants_metric(scheduler)

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
            elif self._metric in metrics:
                self._scheduler.step(metrics[self._metric])
            else:
                check_measured(self._metric, metrics, "scheduler_metric")

    def state(self) -> dict[str, Any]:
        return dict(self._scheduler.state_dict())

    def load_state(self, state: dict[str, Any], step: int) -> None:
        self._scheduler.load_state_dict(state)


class JointSchedule:
    """The schedulers of several optimizers: each follows the steps of its own optimizer, or the epochs."""

    def __init__(self, joint: JointOptimizer, metric: str, check: Callable[[Any], None]) -> None:
        self._joint = joint
        self._members = {
            name: UserSchedule(_made(setup.scheduler, setup.optimizer, check), setup.scheduler_interval, metric)
            for name, setup in joint.setups.items()
            if setup.scheduler is not None
        }
        self.name = joint.describe({name: schedule.name for name, schedule in self._members.items()})

    def step_ended(self, step: int) -> None:
        for name, times in self._joint.take_stepped().items():
            for _ in range(times if name in self._members else 0):
                self._members[name].step_ended(step)

    def epoch_ended(self, metrics: dict[str, float]) -> None:
        for schedule in self._members.values():
            schedule.epoch_ended(metrics)

    def state(self) -> dict[str, Any]:
        return {OF_OPTIMIZERS: {name: schedule.state() for name, schedule in self._members.items()}}

    def load_state(self, state: dict[str, Any], step: int) -> None:
        for name, schedule in self._members.items():
            schedule.load_state(state[OF_OPTIMIZERS][name], step)


def make_schedule(
    scheduler: Any,
    plan: SchedulePlan,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int | None,
    total: int | None,
    *,
    setup: OptimizerSetup | None = None,
    sets: Collection[str] = (),
) -> Schedule:
    """`scheduler` is one of this optimizer, or a Schedule, a function that makes one of it, or None for the plan's own.

    `setup`: of an optimizer that came with its scheduler. `sets`: the names of the validation sets.
    """
    metric = plan.metric or ("val_loss" if "" in sets else "loss")

    def check(made: Any) -> None:
        if wants_metric(made):
            refuse_ambiguous(made, plan.metric, sets)

    joint = optimizer if isinstance(optimizer, JointOptimizer) else None
    setups = [*joint.setups.values()] if joint is not None else [setup] if setup is not None else []
    if not any(one.scheduler is not None for one in setups):
        if scheduler is None:
            return PlannedSchedule(plan, optimizer, steps_per_epoch, total)
        made = _made(scheduler, optimizer, check)
        return made if isinstance(made, Schedule) else UserSchedule(made, plan.interval, metric)
    if not plan.is_constant:
        raise TaskError(
            "both a scheduler of configure_optimizers and lr_schedule/warmup settings are given",
            why="two schedules would set the same learning rate",
            do="keep the scheduler, or the settings",
        )
    if joint is not None:
        return JointSchedule(joint, metric, check)
    return UserSchedule(_made(setups[0].scheduler, optimizer, check), setups[0].scheduler_interval, metric)


def _made(scheduler: Any, optimizer: torch.optim.Optimizer, check: Callable[[Any], None]) -> Any:
    made = make(scheduler, optimizer)
    check(made)
    return made


def wants_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def refuse_ambiguous(scheduler: Any, metric: str, sets: Collection[str]) -> None:
    """Raise where a scheduler wants a metric, and nothing says of which validation set."""
    if metric or not sets or "" in sets:
        return
    losses = [f"val_{name}_loss" for name in sets]
    raise TaskError(
        f"the scheduler {type(scheduler).__name__} wants a metric, and there are {len(sets)} validation sets",
        why=f"there is no val_loss of all of them, only {', '.join(losses)}",
        do=f"set scheduler_metric={losses[0]!r}",
    )


def check_measured(metric: str, metrics: Mapping[str, float], setting: str) -> None:
    """Raise where a metric that a setting names is not among those of its kind; an epoch may have no validation."""
    alike = [name for name in metrics if name.startswith("val_") == metric.startswith("val_")]
    if metric in metrics or not alike:
        return
    raise TaskError(
        f"{setting} names {metric!r}, which is not measured",
        why=f"the run measures {', '.join(sorted(alike))}",
        do=nearest_hint(metric, alike) or f"set {setting} to one of them",
    )
