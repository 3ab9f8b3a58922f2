"""Our Trainer as a user has it: progress, events.jsonl and TensorBoard on, the loss checked at every step."""

from __future__ import annotations

from torch import nn

from distributed.bench.work import Work, make_model, make_optimizer
from distributed.trainers.trainer import Trainer


def train(work: Work) -> None:
    trainer = Trainer(
        make_model(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=make_optimizer,
        epochs=1,
        tensorboard=True,
        backend=work.engine,
    )
    trainer.fit(work.loader())
