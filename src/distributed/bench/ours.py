"""Our Trainer as a user has it: progress, events.jsonl and TensorBoard on, the loss checked at every step."""

from __future__ import annotations

from torch import nn

from distributed.bench.work import Work, make_model, make_optimizer
from distributed.trainers.ddp import PyTorchDDPTrainer


def train(work: Work) -> None:
    trainer = PyTorchDDPTrainer(
        make_model(), loss_fn=nn.CrossEntropyLoss(), optimizer=make_optimizer, epochs=1, tensorboard=True
    )
    trainer.fit(work.loader())
