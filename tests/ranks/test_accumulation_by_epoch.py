"""gradient_accumulation_steps by epoch: the steps of a hand-written loop, on any number of ranks, also resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed import Trainer
from distributed.core.errors import ConfigError, PlanError
from distributed.data.checks.ledger import check_ledgers
from distributed.testing import run_ranks

SAMPLES, BATCH, EPOCHS = 50, 6, 4
SCHEDULE = {0: 1, 1: 2, 3: 3}
STEPS = 9 + 5 + 5 + 3


def problem(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :1] - x[:, 1:2]).square())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def flat(trained: nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in trained.state_dict().values()])


def by_hand() -> torch.Tensor:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for epoch in range(EPOCHS):
        count = max(pair for pair in SCHEDULE.items() if pair[0] <= epoch)[1]
        batches = list(DataLoader(problem(), batch_size=BATCH))
        for start in range(0, len(batches), count):
            group = batches[start : start + count]
            samples = sum(len(x) for x, _ in group)
            optimizer.zero_grad()
            for x, y in group:
                (nn.functional.mse_loss(trained(x), y) * len(x) / samples).backward()
            optimizer.step()
            rates.step()
    return flat(trained)


def fit(folder: str, ranks: int, **more: Any) -> tuple[torch.Tensor, int, str]:
    options: dict[str, Any] = {"num_gpus": ranks, "batch_size": BATCH // ranks, "epochs": EPOCHS, "progress": False}
    options |= {"gradient_accumulation_steps": SCHEDULE, "lr_schedule": "linear", "sample_ledger": True}
    trained = model()
    trainer = Trainer(
        trained,
        loss_fn=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        checkpoint_dir=folder,
        device="cpu",
        **options | more,
    )
    history = trainer.fit(problem())
    return flat(trained), history.steps, history.run_dir


def fit_whole_and_resumed(folder: str, ranks: int) -> dict[str, tuple[torch.Tensor, int]]:
    """By the schedule of the learning rate, and without one, also stopped within epochs of two kinds."""
    scheduled, steps, run_dir = fit(f"{folder}/scheduled", ranks)
    assert check_ledgers(Path(run_dir) / "ledger", SAMPLES).is_exact
    found = {"scheduled": (scheduled, steps)}
    constant = {"lr_schedule": "constant"}
    found["whole"] = fit(f"{folder}/whole", ranks, **constant)[:2]
    for stop in (4, 12):
        fit(f"{folder}/{stop}", ranks, max_steps=stop, **constant)
        found[f"stopped after {stop}"] = fit(f"{folder}/{stop}", ranks, resume_from_checkpoint=True, **constant)[:2]
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_accumulation_by_epoch_matches_a_hand_written_loop(ranks: int, tmp_path: Path) -> None:
    expected = by_hand()
    for found in run_ranks(fit_whole_and_resumed, ranks, str(tmp_path), ranks):
        assert float((found["scheduled"][0] - expected).abs().max()) < 1e-9
        for name, (weights, steps) in found.items():
            assert steps == STEPS, name
            assert name == "scheduled" or torch.equal(weights, found["whole"][0]), name


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(problem())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel": 2}, "pipeline_parallel=2"),
        ({"reproducible": "bitwise", "virtual_ranks": 2}, "reproducible='bitwise'"),
        ({"backend": "deepspeed"}, "backend='deepspeed'"),
        ({"lr_scaling": "linear"}, "lr_scaling='linear'"),
        ({"warmup_epochs": 1, "lr_schedule": "linear"}, "warmup_epochs"),
        ({"limit_train_batches": 0.5}, "limit_train_batches=0.5"),
        ({"overfit_batches": 2}, "overfit_batches=2"),
        ({"drop_last": True, "gradient_accumulation_steps": {0: 1, 2: 9}}, "no step is left"),
    ],
)
def test_accumulation_by_epoch_is_refused_where_it_cannot_work(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as refused:
        fit(str(tmp_path / "kept"), 2, **{"lr_schedule": "constant", "sample_ledger": False} | settings)
    assert said in str(refused.value)


def test_accumulation_by_epoch_of_a_stream_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(model(), batch_size=4, gradient_accumulation_steps=SCHEDULE, progress=False)
    with pytest.raises(PlanError, match="an iterable dataset"):
        trainer.fit(Stream(), run_dir=str(tmp_path / "run"))


@pytest.mark.parametrize("wrong", [{1: 2}, {0: 0}, {0: 1, -1: 2}, 0])
def test_wrong_schedule_of_accumulation_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        Trainer(model(), gradient_accumulation_steps=wrong)
