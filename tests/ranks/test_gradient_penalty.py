"""A loss with a gradient of a gradient: the same as in one process, or refused with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.core.errors import TaskError
from distributed.testing import run_ranks


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = inputs.requires_grad_()
        for block in self.blocks:
            hidden = block(hidden)
        return inputs, self.head(hidden)


def penalized(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    inputs, score = outputs
    (slope,) = torch.autograd.grad(score.sum(), inputs, create_graph=True)
    return (score - target).square().mean() + slope.square().sum(1).mean()


def train(folder: str, ranks: int, ways: dict[str, dict[str, Any]], device: str = "cpu") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, settings in ways.items():
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
        how = {
            "loss_weighting": "samples",
            "batch_size": 8 // ranks,
            "device": device,
            "progress": False,
            "max_steps": 2,
        }
        trainer = Trainer(Critic(), loss_fn=penalized, run_dir=f"{folder}/{way}", **how, **settings)
        try:
            found[way] = trainer.fit(data)["loss"]
        except TaskError as refused:
            found[way] = str(refused)
    return found


def test_gradient_penalty_matches_one_process_or_is_refused(tmp_path: Path) -> None:
    (alone,) = run_ranks(train, 1, f"{tmp_path}/one", 1, {"ddp": {}})
    ways = {"ddp": {}, "zero-1": {"zero_stage": 1}, "fsdp": {"backend": "fsdp"}}
    for rank in run_ranks(train, 2, f"{tmp_path}/two", 2, ways):
        assert rank["ddp"] == pytest.approx(alone["ddp"], rel=1e-5)
        assert rank["zero-1"] == pytest.approx(alone["ddp"], rel=1e-5)
        assert "create_graph=True" in rank["fsdp"]
        assert "zero_stage=1" in rank["fsdp"]
