"""reproducible='bitwise': the same bytes of weights and optimizer at 1, 2 and 4 ranks, and when the number changes.

Every world has the same global batch of 24 over 8 virtual ranks; 100 samples leave a last step of 4, in which half of
the virtual ranks, and with four ranks two of these, have nothing to do.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed import Trainer
from distributed.core.errors import CheckpointError, ConfigError, PlanError, TaskError
from distributed.testing import run_ranks

GLOBAL_BATCH = 24


class Noisy(Dataset):
    """Samples that are augmented with all three random generators."""

    def __init__(self, samples: int = 100, positions: int = 0, ignored: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, *([positions] if positions else []), 6, generator=generator)
        self.y = torch.randint(0, 3, self.x.shape[:-1], generator=generator)
        if ignored:
            self.y[torch.rand(self.y.shape, generator=generator) < 0.3] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(6)
        return self.x[index] + 0.1 * noise, self.y[index]


class Branches(nn.Module):
    """One layer is used for some samples only, another one never; with buffers that stay, and some that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_used", torch.tensor([True, False]))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.is_used = torch.tensor([False, True])
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        y = self.always(x)
        return y + self.sometimes(x) if bool(x.mean() > 0.15) else y


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).transpose(1, 2)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(7)
    models: dict[str, Any] = {
        "dropout": lambda: nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 3)),
        "batchnorm": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
        ),
        "wide": lambda: nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3)),
        "branches": Branches,
        "tokens": Tokens,
    }
    return models[kind]()


@dataclass(frozen=True)
class Case:
    model: str = "dropout"
    data: dict[str, Any] = field(default_factory=dict)
    loss: nn.Module | None = None
    accumulation: int = 1
    workers: int = 0
    rate: float = 0.001
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "everything": Case(
        accumulation=2,
        settings={"gradient_clipping": 0.5, "lr_schedule": "cosine", "warmup_steps": 2},
    ),
    "bf16": Case(settings={"mixed_precision": "bf16"}),
    "fp16": Case(settings={"mixed_precision": "fp16", "gradient_clipping": 0.5}),
    "batchnorm": Case("batchnorm", {"samples": 99}),
    "halves_are_swapped": Case("wide"),  # large enough for the other way to exchange
    "tokens_with_padding": Case("tokens", {"positions": 5, "ignored": True}, nn.CrossEntropyLoss()),
    "class_weights": Case(loss=nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.7, 0.9]))),
    "summed_loss": Case(loss=nn.CrossEntropyLoss(reduction="sum"), rate=1e-4),
    "unused_parameters": Case("branches"),
    "data_loader_workers": Case(workers=2),
    "one_sample_in_the_last_step": Case(data={"samples": 49}),
}


def digest(name: str, value: Any) -> str:
    """sha256 of a tree of tensors and plain values."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        raw = "".join(digest(str(key), value[key]) for key in sorted(value, key=str)).encode()
    elif isinstance(value, list | tuple):
        raw = "".join(digest(str(index), item) for index, item in enumerate(value)).encode()
    else:
        raw = repr(value).encode()
    return hashlib.sha256(name.encode() + b"=" + raw).hexdigest()


def train(case: Case, ranks: int, run_dir: str, **more: Any) -> tuple[str, list[float], nn.Module]:
    """(sha256 of model and optimizer with its rates, the losses of the epochs, the model)"""
    made: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(parameters, lr=case.rate, weight_decay=0.1))
        return made[0]

    settings: dict[str, Any] = {
        "num_gpus": ranks,
        "batch_size": GLOBAL_BATCH // ranks // case.accumulation,
        "gradient_accumulation_steps": case.accumulation,
        "epochs": 2,
        "seed": 5,
        "reproducible": "bitwise",
        "progress": False,
        "run_dir": run_dir,
        "loss_fn": case.loss,
        "optimizer": make_optimizer,
    }
    model = make_model(case.model)
    trainer = Trainer(model, **settings | case.settings | more)
    history = trainer.fit(DataLoader(Noisy(**case.data), batch_size=1, shuffle=True, num_workers=case.workers))
    losses = [record.metrics["loss"] for record in history.epochs]
    state = {"model": model.state_dict(), "optimizer": made[0].state_dict()}
    return digest("run", state), losses, model


def train_leg(folder: str, name: str, ranks: int, case: str = "bf16", **more: Any) -> str:
    """Go on from where the run of that name stands; three epochs of five steps, or up to max_steps."""
    checkpoints = {"checkpoint_dir": f"{folder}/checkpoints-{name}", "resume_from_checkpoint": True}
    run_dir = f"{folder}/{name}-{ranks}-{more.get('max_steps', 'end')}"
    return train(CASES[case], ranks, run_dir, **checkpoints | {"epochs": 3} | more)[0]


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """All cases at 1, 2 and 4 ranks: digest and losses, by case; and one run that goes from world to world."""
    folder = str(tmp_path_factory.mktemp("runs"))
    cases, one, leg = CASES, train, train_leg

    def all_cases(ranks: int, max_steps: int) -> dict[str, Any]:
        plain = {"reproducible": "off"}
        found: dict[str, Any] = {name: one(c, ranks, f"{folder}/{ranks}-{name}")[:2] for name, c in cases.items()}
        found["normal mode"] = one(cases["everything"], ranks, f"{folder}/{ranks}-plain", **plain)[:2]
        leg(folder, "changing", ranks, max_steps=max_steps)
        return found

    def last_leg() -> dict[str, Any]:
        return {"changing": leg(folder, "changing", 2)}

    ends = {1: 3, 2: 4, 4: 9}  # in the middle of epochs, and right before and in a short step
    found = {1: all_cases(1, ends[1])} | {n: run_ranks(all_cases, n, n, ends[n])[0] for n in (2, 4)}
    found[1]["whole"] = leg(folder, "whole", 1)
    found[2] |= run_ranks(last_leg, 2)[0]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_bitwise_ranks_have_the_bytes_of_one_process(
    name: str, ranks: int, by_ranks: dict[int, dict[str, Any]]
) -> None:
    (one, one_losses), (many, many_losses) = by_ranks[1][name], by_ranks[ranks][name]
    assert many == one
    assert many_losses == one_losses, "the reported loss is a sum in the same order"
    assert one_losses[1] != one_losses[0]


def test_normal_mode_bytes_depend_on_world_size(by_ranks: dict[int, dict[str, Any]]) -> None:
    """Else the test above could not fail."""
    assert len({by_ranks[ranks]["normal mode"][0] for ranks in (1, 2, 4)}) == 3


def test_resized_bitwise_run_ends_with_same_bytes(by_ranks: dict[int, Any]) -> None:
    """1 → 2 → 4 → 2 ranks, with bf16, dropout and augmentation."""
    assert by_ranks[2]["changing"] == by_ranks[1]["whole"]


def test_resume_in_mid_epoch_with_augmenting_workers_is_exact(tmp_path: Path) -> None:
    folder, case = str(tmp_path), "data_loader_workers"
    whole = train_leg(folder, "whole", 1, case)
    train_leg(folder, "cut", 1, case, max_steps=7)
    assert train_leg(folder, "cut", 1, case) == whole


def test_resume_with_other_virtual_ranks_or_batch_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    train_leg(folder, "cut", 1, max_steps=5)
    with pytest.raises(CheckpointError, match="virtual_ranks=8, now 4"):
        train_leg(folder, "cut", 1, virtual_ranks=4)
    with pytest.raises(CheckpointError, match="global_batch=24, now 16"):
        train_leg(folder, "cut", 1, batch_size=16)


def test_unused_parameters_stay_and_counters_count_steps(tmp_path: Path) -> None:
    model = train(CASES["unused_parameters"], 1, str(tmp_path))[2]
    fresh = make_model("branches")
    assert torch.equal(model.never.weight, fresh.never.weight), "weight decay would show that it had a gradient"
    assert not torch.equal(model.sometimes.weight, fresh.sometimes.weight)
    assert int(model.calls) == 10, "two epochs of five steps"
    assert model.mask.tolist() == [0.0, -torch.inf]
    assert model.is_used.tolist() == [False, True]
    assert 0.05 < model.mean.mean() < 0.3, "of noise with a mean of 0.15"


def test_batchnorm_statistics_are_means_over_virtual_ranks(tmp_path: Path) -> None:
    """One step, against torch's layer called by hand on each leaf."""

    class Whole(Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([float(index), float(index % 5)]), torch.tensor(index % 2)

    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    options = {"batch_size": 16, "virtual_ranks": 4, "reproducible": "bitwise", "num_gpus": 1, "progress": False}
    Trainer(model, run_dir=str(tmp_path), **options).fit(Whole())
    x = torch.stack([Whole()[index][0] for index in range(16)])
    layers = [nn.BatchNorm1d(2) for _ in range(4)]
    for layer, part in zip(layers, x.split(4), strict=True):
        layer(part)
    torch.testing.assert_close(model[0].running_mean, sum(layer.running_mean for layer in layers) / 4)
    torch.testing.assert_close(model[0].running_var, sum(layer.running_var for layer in layers) / 4)
    assert int(model[0].num_batches_tracked) == 1


def test_bitwise_loss_is_close_to_normal_mode(tmp_path: Path) -> None:
    case = Case("wide")
    bitwise = train(case, 1, f"{tmp_path}/bitwise", epochs=1)
    normal = train(case, 1, f"{tmp_path}/normal", epochs=1, reproducible="off")
    assert bitwise[1] == pytest.approx(normal[1], rel=0.02)  # the augmentation differs


def test_bitwise_run_restores_threads_and_determinism_flags(tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    inside: list[tuple[int, bool]] = []

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        inside.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        return nn.functional.cross_entropy(outputs, target)

    train(Case(loss=loss), 1, str(tmp_path))  # type: ignore[arg-type]
    assert set(inside) == {(1, True)}
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_operation_without_deterministic_kernel_is_named(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        places = torch.arange(outputs.numel())
        return nn.functional.cross_entropy(torch.zeros_like(outputs).put_(places, outputs), target)

    with pytest.raises(TaskError, match="put_ has no deterministic kernel"):
        train(Case(loss=loss), 1, str(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"num_gpus": 3}, PlanError, "num_gpus=2 or 4"),
        ({"num_gpus": 16, "batch_size": 2}, PlanError, "num_gpus=8, or virtual_ranks=16"),
        ({"virtual_ranks": 6}, ConfigError, "power of two, 4 or 8"),
        ({"reproducible": "off", "virtual_ranks": 4}, ConfigError, "virtual_ranks is set, but would have no effect"),
        ({"sync_batchnorm": True}, ConfigError, "sync_batchnorm is set, but would have no effect"),
        ({"batch_size": 2, "gradient_accumulation_steps": 8, "virtual_ranks": 4}, PlanError, "virtual_ranks=8"),
        ({"batch_size": 8, "model": "batchnorm"}, PlanError, "virtual_ranks=4 or fewer"),
    ],
)
def test_impossible_bitwise_settings_are_refused(
    settings: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    options = {"num_gpus": 1, "batch_size": 24, "reproducible": "bitwise", "run_dir": str(tmp_path / "run")} | settings
    with pytest.raises(error, match=says):
        Trainer(make_model(options.pop("model", "dropout")), **options).fit(Noisy())
    assert not (tmp_path / "run").exists()
