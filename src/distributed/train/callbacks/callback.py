"""Callback: the interface of code that runs at points of a training, on every rank, and what it can see and steer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.registry import nearest_hint


class TrainingControl(Protocol):
    """What a callback sees of a training, and what it may ask for. Every rank has its own."""

    model: nn.Module  # of this rank: with shards of its parameters, where it is sharded
    optimizer: torch.optim.Optimizer
    rank: int
    world_size: int
    run_dir: str
    max_epochs: int

    @property
    def epoch(self) -> int: ...

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest means over all ranks, as the history has them: `loss`, `val_loss` …"""

    def log(self, name: str, value: float) -> None:
        """Add a number to the metrics of the epoch, the same on every rank."""

    def stop(self, reason: str) -> None:
        """Ask for the end of the run; all ranks end after the same step. One rank's asking is enough."""

    def save(self) -> None:
        """Ask for a checkpoint; one rank's asking is enough."""


class Callback:
    """Override what you need; each method runs on every rank, at the same place of the training.

    >>> class Patience(Callback):
    ...     def on_epoch_end(self, run, metrics):
    ...         if metrics["loss"] > 10:
    ...             run.stop("the loss has grown")
    """

    def on_fit_start(self, run: TrainingControl) -> None:
        """The model is ready, and what it resumes from is loaded."""

    def on_epoch_start(self, run: TrainingControl) -> None: ...

    def on_step_end(self, run: TrainingControl) -> None:
        """After each optimizer step. It should not wait for the device."""

    def on_validation_start(self, run: TrainingControl) -> None: ...

    def on_validation_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None: ...

    def on_epoch_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None:
        """After the epoch's evaluation, before its checkpoint."""

    def on_save(self, run: TrainingControl) -> None:
        """Before the state of a checkpoint is taken."""

    def on_load(self, run: TrainingControl) -> None:
        """After the state of a checkpoint, or of another rank, was taken over; `load_state` was called before."""

    def on_fit_end(self, run: TrainingControl) -> None: ...

    def on_exception(self, run: TrainingControl, error: BaseException) -> None:
        """The training has failed on this rank. No collective may follow."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, the same on every rank: numbers, texts and tensors."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Kinds, and names that look like a hook and are none, before anything starts."""
    for callback in callbacks:
        kind = type(callback)
        if not isinstance(callback, Callback):
            raise TaskError(
                f"{kind.__name__} is no callback",
                why="the trainer calls the methods of distributed.Callback",
                do=f"class {kind.__name__}(distributed.Callback): …",
            )
        unknown = [name for name in dir(kind) if name.startswith("on_") and name not in HOOKS]
        if unknown:
            raise TaskError(
                f"{kind.__name__}.{unknown[0]} would never be called",
                why=f"the trainer calls {', '.join(HOOKS)}",
                do=nearest_hint(unknown[0], HOOKS) or f"rename {unknown[0]}",
            )
