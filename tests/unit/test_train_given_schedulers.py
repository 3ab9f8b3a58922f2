"""Schedulers as users give them: what makes one is used, and what cannot is refused before anything starts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau, StepLR

from distributed.core.errors import TaskError
from distributed.core.plan import SchedulePlan
from distributed.train.given.tasks import check_task
from distributed.train.schedule import make_schedule
from distributed.train.task import Task


def check(scheduler: Any) -> None:
    check_task(Task(nn.Linear(2, 2), nn.MSELoss(), None, scheduler, None))


@pytest.mark.parametrize(
    "scheduler", [LinearLR, ReduceLROnPlateau, partial(StepLR, step_size=2), lambda optimizer: StepLR(optimizer, 2)]
)
def test_scheduler_factory_needing_only_an_optimizer_is_accepted(scheduler: Any) -> None:
    check(scheduler)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = make_schedule(scheduler, SchedulePlan(), optimizer, 10, 20)
    assert schedule.name in ("LinearLR", "ReduceLROnPlateau", "StepLR")
    schedule.epoch_ended({"loss": 1.0})
    schedule.load_state(schedule.state(), 10)


@pytest.mark.parametrize(("scheduler", "needed"), [(StepLR, "step_size"), (ExponentialLR, "gamma")])
def test_scheduler_class_with_required_arguments_is_refused(scheduler: Any, needed: str) -> None:
    with pytest.raises(TaskError, match=f"it also needs {needed}") as refused:
        check(scheduler)
    assert f"scheduler=lambda optimizer: {scheduler.__name__}(optimizer, {needed}=…)" in str(refused.value)


def test_object_that_makes_no_scheduler_is_refused() -> None:
    with pytest.raises(TaskError, match="scheduler is a str"):
        check("cosine")
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(TaskError, match="returned a NoneType"):
        make_schedule(lambda optimizer: None, SchedulePlan(), optimizer, 10, 20)
