"""`train_step` in a loop of the user's own: ranks with batches of different sizes take the steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from distributed import HorovodTrainer, PyTorchDDPTrainer
from distributed.core.errors import DataError, PlanError, TaskError
from distributed.testing import run_ranks

STEPS = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    size = 3 if (step + rank) % 2 else 5
    return torch.randn(size, 4, generator=generator, dtype=torch.float64), torch.randint(0, 3, (size,))


def steps_of_ranks(folder: str) -> dict[str, tuple[list[float], torch.Tensor]]:
    found = {}
    for name, kind, settings in (
        ("ddp", PyTorchDDPTrainer, {}),
        ("fsdp", PyTorchDDPTrainer, {"sharding": "full"}),
        ("horovod", HorovodTrainer, {"lr_scaling": "none"}),
    ):
        trained = model()
        trainer = kind(trained, optimizer="sgd", learning_rate=0.1, run_dir=f"{folder}/{name}", **settings)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(step)
            data, target = batch(step, torch.distributed.get_rank())
            losses.append(trainer.train_step(data, target))
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained.parameters()]
        found[name] = (losses, torch.cat([p.detach().flatten() for p in whole]))
    return found


def test_steps_of_ranks_match_one_process(tmp_path: Path) -> None:
    trained, expected = model(), []
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for step in range(STEPS):
        parts = []
        for rank in range(2):
            torch.manual_seed(step)
            parts.append(batch(step, rank))
        data, target = (torch.cat(column) for column in zip(*parts, strict=True))
        loss = nn.functional.cross_entropy(trained(data), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in trained.parameters()])
    for ranks in run_ranks(steps_of_ranks, 2, str(tmp_path)):
        for name, (losses, found) in ranks.items():
            assert losses == pytest.approx(expected, abs=1e-10), name
            assert torch.allclose(found, weights, rtol=0, atol=1e-10), name


def test_train_step_refuses_what_it_cannot_synchronize(tmp_path: Path) -> None:
    data, target = torch.randn(4, 4), torch.randint(0, 3, (4,))
    with pytest.raises(TaskError, match="distributed train --script"):
        PyTorchDDPTrainer(model().float(), num_gpus=2).train_step(data, target)
    with pytest.raises(DataError, match="rows"):
        PyTorchDDPTrainer(model().float(), num_gpus=1).train_step(data, target[:3])
    with pytest.raises(PlanError, match="bitwise"):
        PyTorchDDPTrainer(model().float(), num_gpus=1, reproducible="bitwise").train_step(data, target)
