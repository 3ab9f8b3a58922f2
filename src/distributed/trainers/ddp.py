"""PyTorchDDPTrainer: the Trainer with PyTorch's DistributedDataParallel."""

from __future__ import annotations

from distributed.trainers.trainer import Trainer


class PyTorchDDPTrainer(Trainer):
    """The Trainer under its usual engine's name: every rank has the whole model, and gradients are averaged.

    `zero_stage=` and `sharding=` share its state out over the ranks; `deepspeed_config=` gives it to DeepSpeed.
    """
