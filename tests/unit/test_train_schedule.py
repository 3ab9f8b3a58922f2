"""Learning rates: the plan's warm-up and decay, and when a user's own scheduler is stepped, with what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import SchedulePlan
from distributed.train.schedule import make_schedule


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)


def rates(plan: SchedulePlan, steps: int, first: int = 0) -> list[float]:
    """The rate of each step; of a run that is resumed after `first` steps, those that it takes."""
    made = optimizer()
    schedule = make_schedule(None, plan, made, steps_per_epoch=None, total=steps)
    if first:
        schedule.load_state({"peaks": [1.0]}, first)
    found = []
    for step in range(first, steps):
        found.append(made.param_groups[0]["lr"])
        schedule.step_ended(step + 1)
    return found


def test_warmup_and_decay_are_a_function_of_the_step() -> None:
    plan = SchedulePlan("linear", warmup_steps=2, min_ratio=0.2)
    assert rates(plan, 6) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])
    assert rates(plan, 6, first=3) == pytest.approx([0.8, 0.6, 0.4]), "a resumed run has the rates of one that was not"


@pytest.mark.parametrize(("interval", "counts"), [("step", [1, 2, 3, 3]), ("epoch", [0, 0, 0, 1])])
def test_users_scheduler_is_stepped_once_per_interval(interval: str, counts: list[int]) -> None:
    made = optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda count: 0.5**count)
    schedule = make_schedule(scheduler, SchedulePlan(interval=interval), made, 3, 3)
    found = []
    for step in (1, 2, 3):
        made.step()
        schedule.step_ended(step)
        found.append(scheduler.last_epoch)
    schedule.epoch_ended({"loss": 1.0})
    assert [*found, scheduler.last_epoch] == counts


@pytest.mark.parametrize(
    ("epochs", "lowered"),
    [
        ([{"loss": 1.0, "val_loss": 1.0}, {"loss": 0.5, "val_loss": 1.0}], True),
        ([{"loss": 1.0, "val_loss": 1.0}, {"loss": 1.0, "val_loss": 0.5}], False),
        ([{"loss": 1.0}, {"loss": 0.5}], False),
        ([{"loss": 1.0}, {"loss": 1.0}], True),
    ],
)
def test_plateau_scheduler_gets_the_validation_loss(epochs: list[dict[str, float]], lowered: bool) -> None:
    made = optimizer()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0)
    schedule = make_schedule(scheduler, SchedulePlan(), made, 1, 2, sets=[""] if "val_loss" in epochs[0] else [])
    for metrics in epochs:
        schedule.epoch_ended(metrics)
    assert (made.param_groups[0]["lr"] < 1.0) is lowered


def test_plateau_scheduler_waits_for_epochs_with_its_metric() -> None:
    made = optimizer()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0)
    schedule = make_schedule(scheduler, SchedulePlan(metric="val_b_loss"), made, 1, 2, sets=["a", "b"])
    for metrics in (
        {"loss": 1.0, "val_b_loss": 1.0},
        {"loss": 2.0},
        {"loss": 3.0, "val_a_loss": 2.0, "val_b_loss": 0.5},
    ):
        schedule.epoch_ended(metrics)
    assert made.param_groups[0]["lr"] == 1.0
    with pytest.raises(TaskError, match="scheduler_metric names 'val_b_loss', which is not measured"):
        schedule.epoch_ended({"loss": 1.0, "val_a_loss": 1.0})


def test_plateau_scheduler_of_several_sets_must_name_a_metric() -> None:
    made = optimizer()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(made)
    with pytest.raises(TaskError, match="there are 2 validation sets"):
        make_schedule(scheduler, SchedulePlan(), made, 1, 2, sets=["a", "b"])
