"""The overlapped training step of a course on distributed training, as a class with the world's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import nn

from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import ConfigError, DataError
from distributed.core.settings.typed import TrainerSettings
from distributed.train.stragglers.communication import CommunicationShare
from distributed.trainers.trainer import Trainer


class OverlappedTrainer(Trainer):
    """Single steps whose gradients are reduced while the backward pass still computes others.

    Every rank calls `train_step_overlapped` as often, each with a batch of its own, under `distributed train`, torchrun
    or the like. At every `log_every_n_steps`-th step rank 0 prints how much of the communication the step did not wait
    for; `communication` has it as numbers. `bucket_cap_mb="auto"` measures in the first steps what is sent together.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = OverlappedTrainer(model, optimizer, world_size=1, run_dir=tmp / "overlapped")
    >>> x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
    >>> first, *_, last = [trainer.train_step_overlapped(x, y) for _ in range(20)]
    >>> last < first
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
        world_size: int,
        *,
        loss_fn: Callable[..., Any] | None = None,
        **settings: Unpack[TrainerSettings],
    ) -> None:
        """`loss_fn`: of outputs and target; by default the cross-entropy."""
        world = worker_env()
        found = (world or WorkerEnv()).world_size
        if world_size != found:
            launch = f"distributed train --script SCRIPT --num-gpus {world_size}"
            raise ConfigError(
                f"OverlappedTrainer(world_size={world_size})",
                why=f"this process is one of {found}: every rank brings its own batches, so each runs this loop",
                do=launch if world is None else f"OverlappedTrainer(model, optimizer, {found})",
            )
        settings.setdefault("num_gpus", world_size)
        super().__init__(model, loss_fn=loss_fn or nn.CrossEntropyLoss(), optimizer=optimizer, **settings)
        self.world_size, self.optimizer = world_size, optimizer
        self._taken = 0

    def train_step_overlapped(self, data: Any, target: Any = None) -> float:
        """One step with this rank's batch, as `data` and `target` or as a pair; the mean loss over all ranks."""
        if target is None:
            if not (isinstance(data, tuple | list) and len(data) == 2):
                why = "the loss is of the model's outputs and of a target"
                raise DataError("a batch without a target", why=why, do="train_step_overlapped(data, target)")
            data, target = data
        self._taken += 1
        every = self.config.log_every_n_steps
        loss = self._take_step(data, target, measure=self.world_size > 1 and self._taken % every == 0)
        share = self.communication
        if share is not None and self.is_main and self._taken % every == 0:
            print(f"step {self._taken}: {share}", flush=True)
        return loss

    @property
    def bucket_cap_mb(self) -> float | None:
        """The size of buckets that the next step has; None before the first one."""
        return None if self._steps is None else self._steps.bucket_cap_mb

    @property
    def communication(self) -> CommunicationShare | None:
        """Of the last step that was measured; None: none was, or DDP does not reduce its gradients."""
        return None if self._steps is None else self._steps.communication
