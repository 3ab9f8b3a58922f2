"""A small training with everything that a kill could disturb: dropout, noise drawn by workers, clipping, a schedule."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed import Trainer

STEP_S = 0.01  # a step takes at least this, so that a fault can be aimed


class Augmented(Dataset):
    """Samples with noise."""

    def __len__(self) -> int:
        return 403

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(6), int(x[0] > 0)


def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(STEP_S)
    return nn.functional.cross_entropy(outputs, target)


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
Trainer(
    model,
    loss_fn=loss,
    batch_size=8,
    epochs=10_000,
    learning_rate=0.01,
    lr_schedule="cosine",
    warmup_steps=3,
    gradient_clipping=1.0,
).fit(DataLoader(Augmented(), shuffle=True))
