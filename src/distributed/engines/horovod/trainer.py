"""HorovodTrainer: the Trainer with Horovod, by the names and defaults that its users know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from distributed.core.config import DistributedConfig
from distributed.core.registry import is_installed
from distributed.engines.horovod.ring import import_horovod
from distributed.runtime.world import CollectiveError
from distributed.train.task import Task
from distributed.trainers.options import StepOptions
from distributed.trainers.trainer import Trainer


class HorovodTrainer(Trainer):
    """Trains with Horovod: `compression="fp16"` or `hvd.Compression.fp16`, and all settings of the Trainer besides.

    The learning rate is scaled by the size of the global batch, as Horovod's users do themselves: the plan says by how
    much, and `lr_scaling="none"` leaves it. Adasum needs no scaling, so with it there is none unless it is asked for.
    A script may call `hvd.init()` first or leave it to `fit`; `verbose=False` shows no progress.

    >>> trainer = HorovodTrainer(nn.Linear(4, 2), compression="fp16", num_gpus=2)
    >>> trainer.config.backend, trainer.config.compression, trainer.config.lr_scaling
    ('horovod', 'fp16', 'linear')
    """

    preset: Mapping[str, Any] = {"backend": "horovod", "lr_scaling": "linear"}

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Task,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        config: DistributedConfig | Mapping[str, Any] | None = None,
        verbose: bool = True,
        **options: Unpack[StepOptions],
    ) -> None:
        if not verbose:
            options.setdefault("progress", False)
        super().__init__(model, config, optimizer=optimizer, loss_fn=loss_fn, **options)

    def _merge(self, settings: Mapping[str, Any]) -> DistributedConfig:
        config, own = super()._merge(settings), type(self).__name__
        if config.gradient_reduction == "adasum" and config.source("lr_scaling") == own:
            config = config.merged({"lr_scaling": "none"}, own)
        return config

    def metric_average(self, value: float | torch.Tensor, name: str = "metric") -> float:
        """The mean over the ranks of a value that each of them has; in a process that was started alone, the value.

        Every rank must call it, with the metrics in the same order.

        >>> HorovodTrainer(nn.Linear(4, 2), num_gpus=2).metric_average(0.5, "accuracy")
        0.5
        """
        mine = torch.tensor([float(value)], dtype=torch.float64)
        try:  # without a session, which there is in `fit` alone: the error below has the metric's name
            if dist.is_initialized():
                dist.all_reduce(mine)
                return mine.item() / dist.get_world_size()
            if is_installed("horovod.torch"):
                hvd = import_horovod()
                if hvd.is_initialized() and hvd.size() > 1:  # before the first `fit`
                    return float(hvd.allreduce(mine, name=f"metric.{name}").item())
        except RuntimeError as failed:
            raise CollectiveError(f"in metric_average of {name!r}: {failed}") from failed
        return mine.item()
