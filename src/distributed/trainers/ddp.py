"""PyTorchDDPTrainer: the Trainer with PyTorch's DistributedDataParallel."""

from __future__ import annotations

from distributed.trainers.trainer import Trainer


class PyTorchDDPTrainer(Trainer):
    """A preset of `Trainer`: the model is replicated on every rank, and gradients are averaged over all of them."""

    preset = {"backend": "pytorch-ddp"}  # noqa: RUF012 - a constant of the class
