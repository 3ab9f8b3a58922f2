"""Handwritten digits on N synchronized processes: the data, a model, one call of `fit`, and what came of it.

    python ddp_mnist.py --num-gpus 2                              the script starts the ranks itself
    distributed train --script ddp_mnist.py --num-gpus 2          every rank runs this script, and `fit` joins them
    torchrun --nproc-per-node 2 ddp_mnist.py                      the same

There is no `if __name__ == "__main__"`: the ranks that `fit` starts do not import this script again. They are sent the
model and the data instead, so whatever stands here runs once.
"""

import argparse

import torch
import torch.distributed as dist
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

from distributed import PyTorchDDPTrainer

parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
parser.add_argument("--num-gpus", type=int, help="devices; CPU processes where there is no CUDA")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32, help="samples a device and step")
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--data-dir", help="folder with MNIST's files; by default scikit-learn's small digits")
arguments = parser.parse_args()


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer, for grey images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


torch.manual_seed(0)  # for the weights, which are drawn here
train_set, test_set = load_digits(arguments.data_dir)
trainer = PyTorchDDPTrainer(
    model=SmallCNN(),
    num_gpus=arguments.num_gpus,
    epochs=arguments.epochs,
    learning_rate=arguments.learning_rate,
    log_every_n_steps=10,
)
history = trainer.fit(
    DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True), DataLoader(test_set, batch_size=256)
)

if not dist.is_initialized() or dist.get_rank() == 0:  # a launcher's ranks all come here; one of them is enough
    print(f"best accuracy {history.best_accuracy:.4f} after {history.total_time:.1f} s on {history.world_size} ranks")
