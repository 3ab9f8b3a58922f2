"""Modules that come in eval mode stay there while the rest is trained, on one rank, under DDP and FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.testing import run_ranks

BATCH = 8


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 4, generator=generator), torch.randint(0, 2, (32,), generator=generator))


def trained(frozen: list[int] | None, ranks: int, folder: str, **settings: Any) -> dict[str, Any]:
    model = make_model()
    if frozen is None:
        model.eval()
    for index in frozen or ():
        model[index].eval()
    before = [module.training for module in model]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"batch_size": BATCH // ranks, "epochs": 2, "progress": False, "num_gpus": ranks, "device": "cpu"}
    trainer = Trainer(model, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), **options | settings, run_dir=folder)
    history = trainer.fit(make_data(), make_data())
    return {
        "loss": history["loss"],
        "mean": model[1].running_mean.clone() if trainer.is_main else None,
        "modes": [module.training for module in model] == before,
    }


def on_two_ranks(folder: str) -> dict[str, Any]:
    return {
        "ddp": trained([1, 2], 2, f"{folder}/ddp"),
        "fsdp": trained([1, 2], 2, f"{folder}/fsdp", backend="fsdp", whole_model_on="all"),
        "bitwise": trained([1, 2], 2, f"{folder}/bitwise", reproducible="bitwise", virtual_ranks=2),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("modes"))


@pytest.fixture(scope="module")
def by_rank(folder: str) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


def by_hand() -> list[float]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].eval()
    model[2].eval()
    x, y = make_data().tensors
    losses = []
    for _ in range(2):
        total = 0.0
        for at in range(0, 32, BATCH):
            loss = nn.functional.cross_entropy(model(x[at : at + BATCH]), y[at : at + BATCH])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * BATCH
        losses.append(total / 32)
    return losses


def test_modules_in_eval_mode_stay_in_eval_mode(folder: str) -> None:
    found = trained([1, 2], 1, f"{folder}/one")
    assert found["loss"] == pytest.approx(by_hand())
    assert torch.equal(found["mean"], torch.zeros(8))
    assert found["modes"]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "bitwise"])
def test_modules_in_eval_mode_stay_so_on_two_ranks(name: str, by_rank: list[dict[str, Any]]) -> None:
    first, second = (found[name] for found in by_rank)
    assert first["loss"] == second["loss"] == pytest.approx(by_hand())
    assert torch.equal(first["mean"], torch.zeros(8))
    assert first["modes"]
    assert second["modes"]


def test_model_in_eval_mode_as_a_whole_is_trained(folder: str) -> None:
    found = trained(None, 1, f"{folder}/whole")
    assert not torch.equal(found["mean"], torch.zeros(8))
    assert found["modes"]
