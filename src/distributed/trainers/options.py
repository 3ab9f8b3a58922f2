"""What trainers take by keyword, for those that pass it on to `Trainer`: their settings, and the parts of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distributed.core.settings.typed import TrainerSettings
from distributed.train.callbacks.callback import Callback
from distributed.train.task import Step


class StepOptions(TrainerSettings, total=False):
    """All but the optimizer and the loss, which some trainers take by position."""

    scheduler: Any
    metrics: Mapping[str, Callable[[Any, Any], torch.Tensor]] | None
    training_step: Step | None
    validation_step: Step | None
    predict_step: Step | None
    configure_optimizers: Callable[[nn.Module], Any] | None
    callbacks: Sequence[Callback]


class TrainerOptions(StepOptions, total=False):
    """All."""

    loss_fn: Callable[..., Any] | None
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None
