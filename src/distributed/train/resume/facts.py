"""Facts of the user's objects that identify a run: stored in a checkpoint, compared when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from distributed.data.checks.fingerprint import data_parts
from distributed.data.source import Source
from distributed.strategies.model.optimizer_state import optimizer_kind
from distributed.train.callbacks.callback import Callback, keyed
from distributed.train.loss.state import loss_options, loss_values
from distributed.train.resume.changes import LENGTH_BUCKETS
from distributed.train.schedule import Schedule
from distributed.train.task import Task


@dataclass(frozen=True)
class Facts:
    """As they were before the first step."""

    found: Mapping[str, Any]  # as JSON has it; the names are those of `train/resume/changes.py`
    train: Source

    def to_save(self) -> dict[str, Any]:
        """Without parts that the dataset has changed since, such as a cache: they do not identify the data."""
        now = data_parts(self.train)
        data = {name: digest for name, digest in self.found.get("data", {}).items() if now.get(name) == digest}
        return {**self.found, "data": data}


def describe(
    task: Task,
    train: Source,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    total_steps: int | None,
    *,
    compares_data: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Facts:
    """`compares_data`: sample_check."""
    is_own = train.sampler is not None
    found = {
        "shuffle": None if is_own or train.is_stream else train.shuffle,
        "sampler": type(train.sampler).__name__ if is_own else LENGTH_BUCKETS * (train.length_of is not None),
        "loss": {
            "name": task.loss_name,
            "state": loss_values(task.loss_state()),
            "options": loss_options(task.loss_fn),
        },
        "optimizer": optimizer_kind(optimizer),
        "scheduler": schedule.name,
        "total_steps": total_steps,
        "data": data_parts(train) if compares_data else {},
        "callbacks": {name: _options(callback) for name, callback in keyed(callbacks).items()},
    }
    return Facts(found, train)


def _options(callback: Callback) -> dict[str, str]:
    """What a callback that is a dataclass was made with."""
    if not is_dataclass(callback):
        return {}
    return {field.name: repr(getattr(callback, field.name)) for field in fields(callback) if field.init}
