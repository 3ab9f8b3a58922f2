"""`train_step` in a loop of the user's own: ranks with batches of different sizes take the steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from distributed import HorovodTrainer, OptimizerSetup, PyTorchDDPTrainer, callbacks
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


def unfrozen_within(folder: str, ranks: int) -> torch.Tensor:
    """The batches of both ranks, taken by two ranks or by one."""
    trained = model()
    trained[0].requires_grad_(False)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trainer = PyTorchDDPTrainer(trained, num_gpus=ranks, optimizer=optimizer, run_dir=f"{folder}/{ranks}")
    rank = torch.distributed.get_rank() if ranks == 2 else 0
    for step in range(STEPS):
        trained[0].requires_grad_(step in (2, 3))
        torch.manual_seed(step)
        whole = [torch.cat(column) for column in zip(batch(step, 0), batch(step, 1), strict=True)]
        trainer.train_step(*(column.chunk(ranks)[rank] for column in whole))
    return torch.cat([p.detach().flatten() for p in trained.parameters()])


def test_unfreezing_between_single_steps_is_that_of_one_process(tmp_path: Path) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for step in range(STEPS):
        trained[0].requires_grad_(step in (2, 3))
        torch.manual_seed(step)
        data, target = (torch.cat(column) for column in zip(batch(step, 0), batch(step, 1), strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(data), target).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in trained.parameters()])
    found = [unfrozen_within(str(tmp_path), 1), *run_ranks(unfrozen_within, 2, str(tmp_path), 2)]
    assert all(torch.allclose(one, expected, rtol=0, atol=1e-12) for one in found)


def test_train_step_refuses_what_it_cannot_synchronize(tmp_path: Path) -> None:
    data, target = torch.randn(4, 4), torch.randint(0, 3, (4,))
    with pytest.raises(TaskError, match="distributed train --script"):
        PyTorchDDPTrainer(model().float(), num_gpus=2).train_step(data, target)
    with pytest.raises(DataError, match="rows"):
        PyTorchDDPTrainer(model().float(), num_gpus=1).train_step(data, target[:3])
    with pytest.raises(PlanError, match="bitwise"):
        PyTorchDDPTrainer(model().float(), num_gpus=1, reproducible="bitwise").train_step(data, target)


def test_train_step_refuses_what_no_single_step_does() -> None:
    """What would leave the numbers other than those that were asked for, and say nothing."""

    def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def configured(module: nn.Module) -> OptimizerSetup:
        return OptimizerSetup(torch.optim.SGD(module.parameters(), lr=0.1), scheduler=decaying)

    data, target = torch.randn(4, 4), torch.randint(0, 3, (4,))
    for match, given in (
        ("the trainer has EMA", {"callbacks": [callbacks.EMA(0.9)]}),
        ("learning-rate schedule", {"lr_schedule": "cosine", "max_steps": 10}),
        ("learning-rate schedule", {"warmup_steps": 2}),
        ("a scheduler is given", {"optimizer": "sgd", "scheduler": decaying}),
        ("a scheduler is given", {"configure_optimizers": configured}),
        ("4 micro-batches", {"gradient_accumulation_steps": 4}),
    ):
        with pytest.raises(TaskError, match=match):
            PyTorchDDPTrainer(model().float(), num_gpus=1, **given).train_step(data, target)
