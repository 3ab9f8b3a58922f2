"""A run that is resumed with something changed: it is refused, or says what has changed and claims nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distributed import Trainer
from distributed.core.errors import CheckpointError, TaskError
from distributed.data.checks.ledger import check_ledgers


def problem() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 4, generator=generator) * 3, torch.randn(64, 1, generator=generator) * 3)


class Anneal(nn.Module):
    """A loss that counts, one that is scaled by what it has seen, and a table that nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (outputs - target).square().mean()
        self.scale.mul_(0.9).add_(0.1 * loss.detach())
        self.count.add_(1)
        return loss / self.scale.detach() + loss / self.count


class Warmed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps.add_(1)
        return self.layers(inputs * self.table) * (1 - 0.5**self.steps)


def train(folder: Path, steps: int | None, *, resume: Any = False, shuffle: bool = True, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = more.pop("model", Warmed)()
    make = more.pop("make", lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    data = more.pop("data", problem())
    options = {"loss_fn": Anneal(), "num_gpus": 1, "batch_size": 8, "progress": False, "device": "cpu"}
    options |= {"run_dir": str(folder), "max_steps": steps, "resume_from_checkpoint": resume, "sample_ledger": True}
    trainer = Trainer(model, optimizer=make(model), **options | more)
    validation = DataLoader(problem(), batch_size=10)
    trainer.fit(DataLoader(data, batch_size=8, shuffle=shuffle), validation)
    return trainer


def told(folder: Path, kind: str) -> list[Any]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loss_state_and_nonpersistent_buffers_survive_a_resume(tmp_path: Path) -> None:
    every = {"epochs": 2, "checkpoint_frequency": "12 steps"}
    whole = train(tmp_path / "whole", 16, **every)
    train(tmp_path / "cut", 12, **every)
    again = train(tmp_path / "cut", 16, resume=True, **every)
    assert_same(whole.model, again.model)
    mine, theirs = again._task.loss_fn, whole._task.loss_fn
    assert isinstance(mine, Anneal)
    assert isinstance(theirs, Anneal)
    assert torch.equal(mine.scale, theirs.scale)
    assert torch.equal(mine.count, theirs.count)
    assert mine.count == 16, "an evaluation leaves no trace"
    saved = json.loads((tmp_path / "cut/checkpoints/step-000012/manifest.json").read_text())["shared"]["tensors"]
    assert {"loss_fn/scale", "nonpersistent/model/steps", "nonpersistent/loss_fn/count"} <= saved.keys()
    assert "nonpersistent/model/table" not in saved, "it has not changed"


def test_certificate_over_no_steps_is_neither_pass_nor_fail(tmp_path: Path) -> None:
    train(tmp_path, 4)
    train(tmp_path, 6, resume=True)
    (verdict,) = told(tmp_path, "ResumeCompared")
    assert (verdict["passed"], verdict["steps"]) == (None, 0)
    assert "PASS" not in verdict["text"]
    assert "no step after it was recorded" in verdict["text"]


def test_certificate_of_shorter_run_counts_compared_steps(tmp_path: Path) -> None:
    train(tmp_path / "a", 8, checkpoint_frequency="4 steps")
    train(tmp_path / "b", 5, resume=str(tmp_path / "a/checkpoints/step-000004"))
    (verdict,) = told(tmp_path / "b", "ResumeCompared")
    assert (verdict["passed"], verdict["steps"]) == (True, 1)


def test_run_reports_its_resume_point_or_nothing_to_resume(tmp_path: Path) -> None:
    train(tmp_path, 2, resume=True)
    train(tmp_path, 4, resume=True)
    first, second = (event["decisions"] for event in told(tmp_path, "RunStarted"))
    assert any(f"nothing to resume in {tmp_path}" in line and "[resume_from_checkpoint]" in line for line in first)
    assert any(line.startswith("restored ") and "at step 2" in line for line in second)
    assert not any("nothing to resume" in line for line in second)
    assert not any(event["message"].startswith("restored") for event in told(tmp_path, "Warned")), "it is good news"


class Drawn(Dataset):
    """Values that are drawn when it is made, a cache, and an augmentation that is never the same."""

    def __init__(self, seed: int) -> None:
        self.values = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
        self.cache = [0.0] * 64

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache[index] += 1.0
        return self.values[index] + os.urandom(1)[0] / 1000, self.values[index, :1]


def test_resume_with_other_data_values_is_refused_unless_allowed(tmp_path: Path) -> None:
    data = Drawn(0)
    train(tmp_path, 8, data=data, epochs=2)
    assert any(data.cache), "the cache is filled, and is not compared"
    train(tmp_path, 10, resume=True, data=data, epochs=2)
    train(tmp_path, 12, resume=True, data=Drawn(0), epochs=2)
    with pytest.raises(CheckpointError, match=r"(?s)dataset\.values .*allow_change=data"):
        train(tmp_path, 14, resume=True, data=Drawn(1))
    train(tmp_path, 14, resume=True, data=Drawn(1), allow_change="data")


@pytest.mark.parametrize(("change", "name"), [({"seed": 1}, "seed"), ({"shuffle": False}, "shuffle")])
def test_resume_with_other_order_in_epoch_needs_allow_change(tmp_path: Path, change: Any, name: str) -> None:
    train(tmp_path, 4)
    with pytest.raises(CheckpointError, match=f"allow_change={name}"):
        train(tmp_path, None, resume=True, **change)
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1, "nothing was trained"
    train(tmp_path, None, resume=True, allow_change=name, **change)
    (verdict,) = told(tmp_path, "ResumeCompared")
    assert verdict["passed"] is None
    assert f"changed since the checkpoint: {name}" in verdict["text"]
    assert not check_ledgers(tmp_path / "ledger", 64).is_exact, "as the user was told"


def test_resume_with_other_seed_between_epochs_warns(tmp_path: Path) -> None:
    train(tmp_path, None)
    train(tmp_path, None, resume=True, seed=1, epochs=2)
    assert any("seed 0 → 1" in event["message"] for event in told(tmp_path, "Warned"))
    assert told(tmp_path, "ResumeCompared")[0]["passed"] is None
    assert check_ledgers(tmp_path / "ledger", 64).is_exact


def grouped(model: Warmed, *, reverse: bool = False) -> torch.optim.SGD:
    first, second = model.layers
    groups = [
        {"params": [first.weight, second.weight], "weight_decay": 0.5},
        {"params": [first.bias, second.bias], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.SGD(groups[::-1] if reverse else groups, lr=0.01, momentum=0.9)


def test_resume_with_reordered_param_groups_is_the_same_run(tmp_path: Path) -> None:
    falling = {"lr_schedule": "linear", "epochs": 2, "checkpoint_frequency": "4 steps"}
    whole = train(tmp_path / "whole", 8, make=grouped, **falling)
    path = str(tmp_path / "whole/checkpoints/step-000004")
    again = train(tmp_path / "again", 8, resume=path, make=lambda model: grouped(model, reverse=True), **falling)
    assert [group["weight_decay"] for group in again._task.optimizer.param_groups] == [0.0, 0.5]
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_resume_with_other_optimizer_is_refused_or_starts_fresh(tmp_path: Path) -> None:
    adam = {"make": lambda model: torch.optim.Adam(model.parameters(), lr=0.01)}
    train(tmp_path, 4, **adam)
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
        with pytest.raises(CheckpointError, match=f"was trained with Adam, and this run has {kind.__name__}"):
            train(tmp_path, 8, resume=True, make=lambda model, kind=kind: kind(model.parameters(), lr=0.01))
    other = {"make": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.02)}
    trainer = train(tmp_path, 8, resume=True, allow_change="optimizer", **other)
    state = [held["step"] for held in trainer._task.optimizer.state.values()]
    assert {int(step) for step in state} == {4}, "steps since it began anew"
    assert trainer._task.optimizer.param_groups[0]["lr"] == 0.02


def test_resume_with_other_loss_is_refused_other_weights_warn(tmp_path: Path) -> None:
    classes = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))

    def fit(name: str, loss: nn.Module, **more: Any) -> None:
        torch.manual_seed(0)
        options = {"num_gpus": 1, "batch_size": 8, "progress": False, "run_dir": str(tmp_path / name)}
        Trainer(nn.Linear(4, 2), loss_fn=loss, **options | more).fit(DataLoader(classes))

    fit("a", nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), max_steps=4)
    again = {"resume_from_checkpoint": str(tmp_path / "a/checkpoints")}
    for loss in (nn.CrossEntropyLoss(), nn.NLLLoss(weight=torch.ones(2))):
        with pytest.raises(CheckpointError, match="allow_change=loss"):
            fit("b", loss, **again)
    fit("c", nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]), label_smoothing=0.1), **again)
    said = " ".join(event["message"] for event in told(tmp_path / "c", "Warned"))
    assert "weight of the loss" in said
    assert "label_smoothing of the loss 0.0 → 0.1" in said


def test_loss_with_trainable_parameters_is_refused() -> None:
    loss = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))
    with pytest.raises(TaskError, match="requires_grad=True: 0"):
        Trainer(nn.Linear(4, 1), loss_fn=loss, num_gpus=1, batch_size=8).fit(problem())
