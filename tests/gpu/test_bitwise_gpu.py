"""reproducible='bitwise' on NCCL: 1, 2 and 4 ranks end with the same bytes, also of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.reading import load
from distributed.testing import run_ranks
from tests.gpu.worlds import SHARED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16", "scaler_init_scale": 1024.0},
}


def train(folder: Path, ranks: int, settings: dict[str, Any]) -> str:
    """The checkpoint at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 8, 8)), nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(576, 256), nn.GELU(), nn.Linear(256, 10),
    )  # fmt: skip
    trainer = Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        reproducible="bitwise",
        batch_size=32 // ranks,
        epochs=2,
        learning_rate=0.01,
        gradient_clipping=0.5,
        seed=3,
        progress=False,
        run_dir=str(folder),
        checkpoint_dir=str(folder / "checkpoints"),
        **settings,
    )
    return trainer.fit(TensorDataset(torch.randn(200, 192), torch.randint(0, 10, (200,)))).checkpoint


def train_all(folder: Path, ranks: int, shared: dict[str, Any]) -> dict[str, str]:
    return {name: train(folder / f"{ranks}-{name}", ranks, shared | more) for name, more in PRECISIONS.items()}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    folder = tmp_path_factory.mktemp("bitwise")
    return {ranks: run_ranks(train_all, ranks, folder, ranks, SHARED, device="cuda")[0] for ranks in (1, 2, 4)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bitwise_ranks_on_nccl_have_the_same_bytes(precision: str, ended: dict[int, dict[str, str]]) -> None:
    one, *others = (flatten(load(ended[ranks][precision], ranks=()).shared)[0] for ranks in (1, 2, 4))
    for other in others:
        assert one.keys() == other.keys()
        assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
