"""Horovod's sums do not depend on when gradients come: three ranks, late at random, end with the same bytes."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.core.registry import is_installed
from distributed.testing import run_ranks

pytestmark = pytest.mark.skipif(not is_installed("horovod.torch"), reason="Horovod is not built: make horovod")
LAYERS, REPEATS, LONGEST_S = 8, 2, 0.004
SIZES_MB = (None, 0.004)  # all gradients of a dtype together, and some of them


class Deep(nn.Module):
    """Two dtypes and a complex parameter, whose backward pass takes another time in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(LAYERS))
        self.layers[::2].double()
        self.phase = nn.Parameter(torch.randn(17, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (self.phase * self.phase.conj()).real
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
            x.register_hook(lambda _: time.sleep(LONGEST_S * random.random() * (random.random() < 0.5)))
        return x.float()


def train(run_dir: str, size_mb: float | None) -> list[bytes]:
    """Weights and moments after a few steps, as bytes."""
    torch.manual_seed(7)
    model, data = Deep(), TensorDataset(torch.randn(48, 17), torch.randint(0, 17, (48,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(
        model, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, backend="horovod", batch_size=4, progress=False,
        run_dir=run_dir, fusion_threshold_mb=size_mb,
    )  # fmt: skip
    trainer.fit(DataLoader(data, batch_size=1), max_steps=4)
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return [torch.view_as_real(t).numpy().tobytes() if t.is_complex() else t.numpy().tobytes()
            for t in [*(p.detach() for p in model.parameters()), *moments]]  # fmt: skip


def test_gradients_in_random_order_end_with_same_bytes(tmp_path: Any) -> None:
    def repeat() -> list[list[list[bytes]]]:
        random.seed()  # every rank is late in its own way, and in another one each time
        return [[train(f"{tmp_path}/{size_mb}-{number}", size_mb) for number in range(REPEATS)] for size_mb in SIZES_MB]

    for rank in run_ranks(repeat, 3):
        for size_mb, (first, *others) in zip(SIZES_MB, rank, strict=True):
            assert len(first) == 2 * (2 * LAYERS + 1)
            assert all(other == first for other in others), f"fusion_threshold_mb={size_mb}"
