"""Ranks that went apart are found, with the tensor and the ranks named, and what they hold is not saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.core.errors import ReplicasDifferError
from distributed.testing import run_ranks


class Flipped(nn.Module):
    """One rank's weight changes by one bit in some step, as memory that fails does it; a step has two passes."""

    def __init__(self, step: int, rank: int) -> None:
        super().__init__()
        self.layer, self.passes, self.step, self.rank = nn.Linear(4, 2), 0, step, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes == 2 * self.step and dist.get_rank() == self.rank:
            with torch.no_grad():
                self.layer.weight.data.view(torch.int32)[0, 0] ^= 1
        return self.layer(x)


class Centered(nn.Module):
    """Keeps a mean of what its own rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x - self.center)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Blocks(nn.Module):
    """Of two blocks; on one rank, a norm that both have changes after some steps."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.blocks, self.head, self.step, self.passes = nn.ModuleList([Block(), Block()]), nn.Linear(4, 2), step, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes == self.step and dist.get_rank() == 1:
            self.blocks[1].norm.bias.data.add_(1e-6)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Measured(Centered):
    """Keeps a mean of what its own rank was evaluated on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.center.copy_(x.detach().mean(0))
        return self.layer(x)


def rank_schedule(optimizer: torch.optim.Optimizer) -> Any:
    """From the second epoch on, another rate on each rank."""
    rank = dist.get_rank()
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 + epoch * rank)


def rank_rates(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1 * (1 + dist.get_rank()))


def found(model: nn.Module, folder: str, samples: int = 320, **more: Any) -> tuple[str, list[str]]:
    """What a run ended with, and the checkpoints that it left."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 2))
    evaluation = DataLoader(TensorDataset(*data[:16]), batch_size=4)
    settings: dict[str, Any] = {"batch_size": 4, "loss_fn": nn.MSELoss(), "progress": False}
    settings |= {"checkpoint_dir": folder, "checkpoint_frequency": "6 steps", "max_steps": 20}
    settings["checkpoint_async"] = False  # a save under way is given up when its run ends with an error
    told = ""
    try:
        Trainer(model, **(settings | more)).fit(DataLoader(data, batch_size=4), evaluation)
    except ReplicasDifferError as error:
        told = str(error)
    return told, sorted(path.name for path in Path(folder).glob("step-*"))


def apart(folder: str) -> dict[str, tuple[str, list[str]]]:
    double = {"gradient_accumulation_steps": 2}
    blocks = {"batch_size": 4, "tensor_parallel": 2}
    return {
        "flip": found(Flipped(10, 1), f"{folder}/flip", **double),
        "buffer": found(Centered(), f"{folder}/buffer"),
        "allowed": found(Centered(), f"{folder}/allowed", check_replicas="parameters"),
        "off": found(Flipped(10, 1), f"{folder}/off", check_replicas=False, **double),
        "rates": found(nn.Linear(4, 2), f"{folder}/rates", optimizer=rank_rates),
        "tensor": found(Blocks(3), f"{folder}/tensor", **blocks),
        "evaluation": found(Measured(), f"{folder}/evaluation"),
        "schedule": found(nn.Linear(4, 2), f"{folder}/schedule", samples=64, epochs=1, scheduler=rank_schedule),
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[str]]]:
    """What rank 0 was told of each case, all in one world; the other rank is told the same."""
    first, second = run_ranks(apart, 2, str(tmp_path_factory.mktemp("apart")))
    assert {name: text for name, (text, _) in first.items()} == {name: text for name, (text, _) in second.items()}
    return first


def test_flipped_bit_is_found_before_the_next_save(told: dict[str, tuple[str, list[str]]]) -> None:
    text, saved = told["flip"]
    assert "differ after step 12: parameter layer.weight" in text
    assert saved == ["step-000006"]


def test_buffer_that_differs_by_rank_is_refused_at_step_one(told: dict[str, tuple[str, list[str]]]) -> None:
    text, saved = told["buffer"]
    assert "after step 1: buffer center" in text
    assert "check_replicas='parameters'" in text
    assert saved == []


@pytest.mark.parametrize("name", ["allowed", "off"])
def test_replica_check_can_be_narrowed_or_turned_off(told: dict[str, tuple[str, list[str]]], name: str) -> None:
    assert told[name] == ("", ["step-000006", "step-000012", "step-000018", "step-000020"])


def test_learning_rates_that_differ_are_refused_before_a_step(told: dict[str, tuple[str, list[str]]]) -> None:
    text, _ = told["rates"]
    assert "before the first step: optimizer option lr of group 0" in text


def test_norm_replicated_over_tensor_ranks_is_compared(told: dict[str, tuple[str, list[str]]]) -> None:
    text, _ = told["tensor"]
    assert "after step 4: parameter blocks.1.norm.bias" in text


def test_buffer_that_evaluation_changes_is_not_saved(told: dict[str, tuple[str, list[str]]]) -> None:
    text, saved = told["evaluation"]
    assert "after step 20: buffer center" in text
    assert saved == ["step-000006", "step-000012", "step-000018"]


def test_learning_rates_differing_after_an_epoch_are_not_saved(told: dict[str, tuple[str, list[str]]]) -> None:
    text, saved = told["schedule"]
    assert "after step 8: optimizer option lr of group 0" in text
    assert saved == ["step-000006"]
