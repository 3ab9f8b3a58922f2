"""With whole_model_on="all" every rank of a launcher has the model after `fit`, whole, and can train it again."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.testing import run_ranks
from tests.ranks.test_model_after_fit import WAYS, Tied


def train_twice(folder: str, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Two runs of one model in each way; the second begins with what the first has trained."""
    found = {}
    for way, settings in ways.items():
        torch.manual_seed(0)
        model = Tied()
        data = TensorDataset(torch.randint(0, 8, (16,)), torch.randint(0, 8, (16,)))
        trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), device="cpu", progress=False, **settings)
        trainer.fit(data, run_dir=f"{folder}/{way}/first", max_steps=2)
        between = {name: value.clone() for name, value in model.state_dict().items()}
        second = trainer.fit(data, run_dir=f"{folder}/{way}/second", max_steps=2)
        found[way] = between, second["loss"], dict(model.state_dict())
    return found


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("twice"))
    asked = {way: settings | {"whole_model_on": "all", "batch_size": 4} for way, settings in WAYS.items()}
    asked["fsdp"]["batch_size"] = asked["zero-1"]["batch_size"] = 2  # on each of two ranks
    return {
        1: run_ranks(train_twice, 1, f"{folder}/one", {"alone": {"batch_size": 4}}),
        2: run_ranks(train_twice, 2, f"{folder}/two", asked),
    }


@pytest.mark.parametrize("way", WAYS)
def test_whole_model_on_all_ranks_continues_training(way: str, twice: dict[int, list[dict[str, Any]]]) -> None:
    first, losses, last = twice[1][0]["alone"]
    for rank in twice[2]:
        between, found, trained = rank[way]
        assert all(type(value) is torch.Tensor for value in [*between.values(), *trained.values()])
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(between, first)
        torch.testing.assert_close(trained, last)


def train_with_little_memory(folder: str) -> tuple[bool, list[str]]:
    torch.manual_seed(0)
    model = Tied()
    needed = sum(value.nbytes for value in model.state_dict().values())
    psutil.virtual_memory = lambda: SimpleNamespace(available=needed * 3 // 2, total=needed * 3)  # type: ignore[assignment]
    data = TensorDataset(torch.randint(0, 8, (16,)), torch.randint(0, 8, (16,)))
    trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), batch_size=2, device="cpu", progress=False, backend="fsdp")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(data, run_dir=folder, max_steps=2, whole_model_on="all")
    is_whole = all(type(value) is torch.Tensor for value in model.state_dict().values())
    return is_whole, [str(one.message) for one in told]


def test_whole_model_stays_on_rank_0_when_memory_is_short(tmp_path: Path) -> None:
    (first, told), (second, _) = run_ranks(train_with_little_memory, 2, str(tmp_path))
    assert first
    assert not second
    assert any("rank 0 alone gets the whole model" in text and "for 2 ranks" in text for text in told)
