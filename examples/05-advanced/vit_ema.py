"""A vision transformer with an exponential moving average of its weights, on small images of stripes.

    python vit_ema.py
    python vit_ema.py --num-gpus 3
    distributed train --script vit_ema.py --num-gpus 2 zero_stage=1

Each row compares with a plain loop of torch in one process, which averages by torch.optim.swa_utils: the trained
weights, the averaged ones, and the validation loss of each epoch, which is that of the averages. The average lies on
the ranks as the model does, so it takes any mesh.
"""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer, callbacks

GLOBAL_BATCH, EPOCHS, DECAY, SIDE, PATCH, WIDTH = 48, 3, 0.9, 16, 4, 32


class VisionTransformer(nn.Module):
    """Patches of an image as a sequence, some blocks of torch's own, and a class by the mean of all places."""

    def __init__(self) -> None:
        super().__init__()
        places = (SIDE // PATCH) ** 2
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(places, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(hidden).mean(1))


def make_images(count: int, seed: int) -> TensorDataset:
    """Stripes in one of four directions, under noise."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (count,), generator=generator)
    angle = kind * torch.pi / 4
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = row * angle.cos()[:, None, None] + column * angle.sin()[:, None, None]
    noise = torch.randn(count, SIDE, SIDE, generator=generator)
    return TensorDataset(((0.9 * along).sin() + 0.5 * noise)[:, None], kind)


def make_model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_by_hand(
    train: TensorDataset, validation: TensorDataset, epochs: int
) -> tuple[nn.Module, nn.Module, list[float]]:
    """The model, its average, and the average's validation losses."""
    model = make_model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(epochs):
        for images, kind in DataLoader(train, batch_size=GLOBAL_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), kind).backward()
            optimizer.step()
            average.update_parameters(model)
        with torch.no_grad():
            images, kind = validation.tensors
            losses.append(nn.functional.cross_entropy(average.eval()(images), kind).item())
    return model, average.module, losses


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in pairs)


parser = argparse.ArgumentParser(description="Train a vision transformer with averaged weights, and compare.")
parser.add_argument("--num-gpus", type=int, default=2)
parser.add_argument("--images", type=int, default=480)
arguments = parser.parse_args()

if __name__ == "__main__":
    train, validation = make_images(arguments.images, 1), make_images(120, 2)
    ranks = int(os.environ.get("WORLD_SIZE", arguments.num_gpus))
    ema = callbacks.EMA(DECAY)
    with tempfile.TemporaryDirectory() as scratch:
        folder = {} if "WORLD_SIZE" in os.environ else {"run_dir": f"{scratch}/run"}
        size = {"num_gpus": ranks, "batch_size": GLOBAL_BATCH // ranks}
        trainer = Trainer(make_model(), optimizer=sgd, callbacks=[ema], epochs=EPOCHS, progress=False, **size, **folder)
        history = trainer.fit(train, validation)
        if trainer.is_main:
            averaged = trainer.averaged_model()
            model, average, losses = train_by_hand(train, validation, len(history.epochs))
            off = max(abs(a - b) for a, b in zip(history["val_loss"], losses, strict=True))
            print(f"{ranks} ranks, {ema.updates} updates, accuracy of the average {history['val_accuracy'][-1]:.3f}")
            print(f"weights     largest difference {difference(trainer.model, model):.1e}")
            print(f"averages    largest difference {difference(averaged, average):.1e}")
            print(f"validation  largest difference {off:.1e}")
