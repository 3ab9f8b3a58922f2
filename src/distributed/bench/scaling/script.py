"""One size of the scaling benchmark: a plain script that calls `Trainer.fit` with a model that is mostly computing."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.trainers.ddp import PyTorchDDPTrainer

SIDE, CLASSES = 32, 10  # images of 3 × SIDE × SIDE


def make_model() -> nn.Module:
    """Convolutions: 0.2 MB of gradients a step against some 3 GFLOP for 32 images, so that computing dominates."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def main() -> None:
    processes, steps, batch, epochs = (int(word) for word in sys.argv[1:5])
    samples = processes * steps * batch
    data = TensorDataset(torch.randn(samples, 3, SIDE, SIDE), torch.randint(CLASSES, (samples,)))
    trainer = PyTorchDDPTrainer(
        make_model(),
        loss_fn=nn.CrossEntropyLoss(),
        num_gpus=processes,
        batch_size=batch,
        epochs=epochs,
        progress=False,
        run_dir=sys.argv[5],
    )
    trainer.fit(data)


if __name__ == "__main__":
    main()
