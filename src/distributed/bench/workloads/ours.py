"""Our Trainer as a user has it: progress, events.jsonl and TensorBoard on, the loss checked at every step."""

from __future__ import annotations

from typing import Any

from torch import nn

from distributed.bench.workloads.job import BenchJob
from distributed.core.history import History
from distributed.trainers.trainer import Trainer


def train(job: BenchJob) -> nn.Module:
    model = job.make_model()
    fit(job, model, nn.CrossEntropyLoss(), {})
    return model


def fit(job: BenchJob, model: nn.Module, loss_fn: Any, settings: dict[str, Any]) -> History:
    trainer = Trainer(
        model,
        loss_fn=loss_fn,
        optimizer=job.make_optimizer,
        epochs=1,
        tensorboard=True,
        backend=job.engine,
        log_every_n_steps=job.log_every,
        **settings,
    )
    return trainer.fit(job.loader())
