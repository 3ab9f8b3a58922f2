"""What of the user's objects tells one run from another: stored in a checkpoint, compared when one is resumed."""

from __future__ import annotations

from typing import Any

import torch

from distributed.data.source import Source
from distributed.strategies.optimizer_state import optimizer_kind
from distributed.train.loss_state import loss_name, loss_options, loss_values
from distributed.train.schedule import Schedule
from distributed.train.task import Task


def describe(
    task: Task, train: Source, optimizer: torch.optim.Optimizer, schedule: Schedule, total_steps: int | None
) -> dict[str, Any]:
    """As JSON has it; the names are those of `train/resume_changes.py`."""
    is_own = train.sampler is not None
    return {
        "shuffle": None if is_own or train.is_stream else train.shuffle,
        "sampler": type(train.sampler).__name__ if is_own else "",
        "loss": {
            "name": loss_name(task.loss_fn),
            "state": loss_values(task.loss_state()),
            "options": loss_options(task.loss_fn),
        },
        "optimizer": optimizer_kind(optimizer),
        "scheduler": schedule.name,
        "total_steps": total_steps,
    }
