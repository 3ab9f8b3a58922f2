"""Gradients that are reduced behind the backward pass: how much is hidden, and buckets that a run measures for itself.

With three ranks the buckets decide in which order gradients are added. A run whose steps are slow with all sizes but
one chooses that one, and whoever resumes from its checkpoints must have it too, whatever is fast by then.
"""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import OverlappedTrainer, Trainer
from distributed.checkpoint.restore.reading import load
from distributed.core.errors import ConfigError, DataError
from distributed.core.events import ResumeCompared, StepEnded, Warned, parse_event
from distributed.strategies.steps.mesh_step import MeshStep
from distributed.testing import run_ranks
from distributed.train.loop_parts.bucket_trial import CAPS_MB, cap_of, steps_of_trial

RANKS, WIDTH, GLOBAL_BATCH = 3, 512, 12
SIZES = CAPS_MB[:3]  # of a model of 6 MB
CHOSEN_AT = steps_of_trial(SIZES)
STEPS, WITHIN = CHOSEN_AT + 6, 10  # of a run; at which a checkpoint lies before the choice
SLOW_S = 0.25


class Layers(nn.Module):
    """Layers that are used in another order than they are made in, and steps that are slow with all sizes but one."""

    def __init__(self, fast_mb: float = 0.0, first_step: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.last, self.fast_mb, self.step = nn.Linear(WIDTH, 4), fast_mb, first_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.fast_mb and cap_of(self.step, SIZES) != self.fast_mb:
            sleep(SLOW_S)
        self.step += self.training
        for place in (3, 1, 5, 0, 4, 2):
            x = self.layers[place](x).tanh()
        found: torch.Tensor = self.last(x)
        return found


def rows(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    samples = GLOBAL_BATCH * steps
    return TensorDataset(torch.randn(samples, WIDTH, generator=generator), torch.arange(samples) % 4)


def train(folder: str, model: nn.Module, **settings: Any) -> dict[str, Any]:
    """On ranks that are there."""
    kept: list[MeshStep] = []
    plain = MeshStep.close
    MeshStep.close = lambda self: (kept.append(self), plain(self))[1]  # type: ignore[method-assign, func-returns-value]
    try:
        trainer = Trainer(
            model,
            loss_fn=nn.CrossEntropyLoss(),
            optimizer="sgd",
            **{"learning_rate": 0.5, "batch_size": 4, "run_dir": folder, "progress": False} | settings,
        )
        trainer.fit(DataLoader(rows(STEPS), batch_size=4))
    finally:
        MeshStep.close = plain  # type: ignore[method-assign]
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    choice = kept[0].bucket_choice
    return {"weights": weights, "choice": choice and choice.to_save(), "events": events_of(trainer)}


def events_of(trainer: Trainer) -> list[Any]:
    """Of rank 0's file, which is gone with the ranks."""
    assert trainer.history is not None
    lines = (Path(trainer.history.run_dir) / "events.jsonl").read_text().splitlines()
    return [parse_event(line) for line in lines] if dist.get_rank() == 0 else []


def runs_of_ranks(folder: str) -> dict[str, dict[str, Any]]:
    saved = {"bucket_cap_mb": "auto", "checkpoint_dir": f"{folder}/saved"}
    found = {"whole": train(f"{folder}/whole", Layers(5.0), checkpoint_frequency=f"{WITHIN} steps", **saved)}
    found["fixed"] = train(f"{folder}/fixed", Layers(), bucket_cap_mb=25)
    for name, step, fast_mb in (("within", WITHIN, 1.0), ("after", CHOSEN_AT + 4, 25.0)):
        resumed = {"resume_from_checkpoint": f"{folder}/saved/step-{step:06d}", "bucket_cap_mb": "auto"}
        found[name] = train(f"{folder}/{name}", Layers(fast_mb, first_step=step + 1), **resumed)
    from_fixed = {"resume_from_checkpoint": f"{folder}/saved/step-{CHOSEN_AT + 4:06d}", "bucket_cap_mb": 1}
    found["overridden"] = train(f"{folder}/overridden", Layers(), **from_fixed)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overlap")


@pytest.fixture(scope="module")
def runs(folder: Path, template: None) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(runs_of_ranks, RANKS, str(folder))


def test_ranks_choose_the_size_that_was_fast(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        choice = rank["whole"]["choice"]
        assert (choice["cap_mb"], choice["begun_at"], choice["is_settled"]) == (5.0, 0, True)
        assert choice == runs[0]["whole"]["choice"]
        assert torch.equal(rank["whole"]["weights"], runs[0]["whole"]["weights"])
    warnings = [event.message for event in runs[0]["whole"]["events"] if isinstance(event, Warned)]
    (said,) = [message for message in warnings if "bucket_cap_mb" in message]
    assert all(f"ms with {size:g} MB" in said for size in SIZES)


def test_buckets_have_the_order_in_which_gradients_come(runs: list[dict[str, Any]]) -> None:
    last, used = [12, 13], (2, 4, 0, 5, 1, 3)  # the numbers of the last layer's parameters; other layers, backwards
    order = runs[0]["whole"]["choice"]["order"]
    assert [number // 2 for number in order[::2]] == [last[0] // 2, *used]


def test_measured_run_is_the_run_of_one_process(runs: list[dict[str, Any]]) -> None:
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, target in DataLoader(rows(STEPS), batch_size=GLOBAL_BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for name in ("whole", "fixed", "overridden"):
        assert torch.allclose(runs[0][name]["weights"], weights, rtol=0, atol=1e-6)


def test_another_layout_is_another_sum(runs: list[dict[str, Any]]) -> None:
    """Else the tests below would show nothing."""
    assert not torch.equal(runs[0]["whole"]["weights"], runs[0]["fixed"]["weights"])


@pytest.mark.parametrize("name", ["within", "after"])
def test_resumed_run_has_the_buckets_of_the_first(name: str, runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert rank[name]["choice"] == runs[0]["whole"]["choice"]
        assert torch.equal(rank[name]["weights"], runs[0]["whole"]["weights"])
    compared = [event for event in runs[0][name]["events"] if isinstance(event, ResumeCompared)]
    assert [event.passed for event in compared] == [True]


def test_a_size_that_is_set_wins_over_the_checkpoint(runs: list[dict[str, Any]], folder: Path) -> None:
    assert runs[0]["overridden"]["choice"] is None
    assert "bucket_cap_mb auto → 1" in " ".join(map(repr, runs[0]["overridden"]["events"]))
    assert load(f"{folder}/saved/step-{CHOSEN_AT + 4:06d}", ranks=()).shared["buckets"]["cap_mb"] == 5.0


LATE_STEPS = 10


class SlowBackward(torch.autograd.Function):
    """Nothing in the forward pass, and a while in the backward pass, when the gradients of later layers are done."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        sleep(0.2)
        return gradient


class LateFirstLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rest = nn.Linear(WIDTH, WIDTH), nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rest(SlowBackward.apply(self.first(x)))
        return found


def train_late(folder: str) -> dict[str, list[Any]]:
    how = {"optimizer": "sgd", "batch_size": 4, "max_steps": LATE_STEPS, "log_every_n_steps": 1, "progress": False}
    found = {}
    for name, settings in (
        ("many", {"bucket_cap_mb": 1}),
        ("one", {"bucket_cap_mb": 100}),
        ("compressed", {"compression": "fp16"}),
    ):
        trainer = Trainer(LateFirstLayer(), loss_fn=nn.CrossEntropyLoss(), run_dir=f"{folder}/{name}", **how | settings)
        trainer.fit(DataLoader(rows(STEPS), batch_size=4))
        found[name] = [event for event in events_of(trainer) if isinstance(event, StepEnded)]
    return found


def test_hidden_communication_is_what_the_step_did_not_wait_for(tmp_path: Path) -> None:
    told, _ = run_ranks(train_late, 2, str(tmp_path))
    shares = {}
    for name in ("many", "one"):
        steps = told[name]
        assert len(steps) == LATE_STEPS
        assert all(step.communication_seconds > 0 and 0 <= step.communication_hidden <= 1 for step in steps)
        shares[name] = max(step.communication_hidden for step in steps)  # of the step that was disturbed the least
    assert shares["many"] > 0.5  # six layers of seven are reduced while the first one computes
    assert shares["many"] > shares["one"]
    assert [step.communication_hidden for step in told["compressed"]] == [None] * LATE_STEPS


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    size = 3 if (step + rank) % 2 else 5
    return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64), torch.randint(0, 4, (size,))


def overlapped(folder: str) -> dict[str, Any]:
    model, rank = Layers().double(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = OverlappedTrainer(model, optimizer, dist.get_world_size(), run_dir=folder, log_every_n_steps=3)
    losses = []
    for step in range(6):
        torch.manual_seed(step)
        batch = batch_of(step, rank)
        losses.append(trainer.train_step_overlapped(batch) if step % 2 else trainer.train_step_overlapped(*batch))
    try:
        OverlappedTrainer(model, optimizer, world_size=5)
    except ConfigError as refused:
        problem = str(refused)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"losses": losses, "weights": weights, "share": trainer.communication, "problem": problem}


def test_overlapped_trainer_takes_the_steps_of_one_process(tmp_path: Path) -> None:
    ranks = run_ranks(overlapped, 2, str(tmp_path))
    model = Layers().double()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(6):
        parts = []
        for rank in range(2):
            torch.manual_seed(step)
            parts.append(batch_of(step, rank))
        x, target = (torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, abs=1e-6)
        assert torch.allclose(rank["weights"], weights, rtol=0, atol=1e-6)
        assert rank["share"].seconds > 0
        assert "this process is one of 2" in rank["problem"]


def test_overlapped_trainer_wants_a_target_and_its_ranks() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="world_size=2"):
        OverlappedTrainer(model, optimizer, world_size=2)
    with pytest.raises(DataError, match="without a target"):
        OverlappedTrainer(model, optimizer, world_size=1).train_step_overlapped(torch.zeros(3, 4))
