"""A run that was killed is the same run: its bytes, its samples, and a certificate that says so or what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.core.errors import CheckpointError
from distributed.testing import run_ranks
from tests.conftest import clean_environ


def test_randomly_killed_runs_end_with_same_bytes(tmp_path: Path) -> None:
    """Of each rank alone and of both at once, with and without data loader workers; many more are in `make soak`."""
    script = Path(__file__).with_name("kill_histories.py")
    command = [sys.executable, str(script), str(tmp_path / "kills"), "--histories", "4"]
    result = subprocess.run(
        command, env=clean_environ(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=280
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 4, result.stderr
    assert [row for row in rows if not row["same"]] == []
    assert sum(row["kills"] for row in rows) >= 6
    assert all(row["exactly once"] == "True" for row in rows)


def problem(samples: int = 90) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_trainer(folder: str, ranks: int, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    options = {
        "batch_size": 3,
        "epochs": 2,
        "checkpoint_dir": f"{folder}/checkpoints",
        "progress": False,
        "num_gpus": ranks,
    }
    return Trainer(model, mixed_precision="fp16", learning_rate=0.01, **options | more)


def verdicts(run_dir: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (Path(run_dir) / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "ResumeCompared"]


def resumed_run(folder: str, ranks: int, bug: str = "") -> tuple[bool, list[dict[str, Any]]]:
    """A whole run, and one that resumes its checkpoint of step 4, with a bug in the resume if one is named."""
    whole = make_trainer(folder, ranks, run_dir=f"{folder}/whole", checkpoint_frequency="4 steps")
    whole.fit(DataLoader(problem(), shuffle=True))
    seed_bug(bug)
    path = f"{folder}/checkpoints/step-000004"
    again = make_trainer(folder, ranks, run_dir=f"{folder}/again", resume_from_checkpoint=path)
    again.fit(DataLoader(problem(), shuffle=True), checkpoint_dir=f"{folder}/second")
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    assert again.history is not None
    return all(torch.equal(a, b) for a, b in pairs), verdicts(again.history.run_dir)


def seed_bug(name: str) -> None:
    """Breaks the resume in one place, in this process only."""
    from distributed.data.loading.loader import TrainLoader
    from distributed.runtime.session import Session
    from distributed.strategies.replicated import Replicated

    if name == "rng of one rank":
        seed_step = Session.seed_step
        Session.seed_step = lambda self, seed, step: seed_step(self, seed + (self.rank == 1), step)  # type: ignore[method-assign]
    elif name == "sampler off by one batch":
        epoch = TrainLoader.epoch
        TrainLoader.epoch = lambda self, number, first=0: epoch(self, number, first + (first > 0))  # type: ignore[method-assign]
    elif name in ("scaler not restored", "optimizer step count"):
        load = Replicated.load_state

        def load_wrongly(self: Replicated, tree: dict[str, Any]) -> None:
            if name == "scaler not restored":
                tree = {key: value for key, value in tree.items() if key != "scaler"}
            load(self, tree)
            if name == "optimizer step count":
                for held in self.optimizer.state.values():
                    held["step"] += 1

        Replicated.load_state = load_wrongly  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resumed_run_passes_its_certificate(ranks: int, tmp_path: Path) -> None:
    for same, found in run_ranks(resumed_run, ranks, str(tmp_path), ranks):
        assert same
        assert [(verdict["passed"], verdict["steps"]) for verdict in found] == [(True, 3)]
        assert "PASS" in found[0]["text"]


@pytest.mark.parametrize(
    ("bug", "component"),
    [
        ("rng of one rank", "rng"),
        ("sampler off by one batch", "samples"),
        ("scaler not restored", "scaler"),
        ("optimizer step count", "optimizer"),
    ],
)
def test_certificate_names_what_a_broken_resume_lost(bug: str, component: str, tmp_path: Path) -> None:
    for same, found in run_ranks(resumed_run, 2, str(tmp_path), 2, bug):
        assert not same or bug == "scaler not restored"
        assert [verdict["component"] for verdict in found] == [component], found
        assert "FAIL" in found[0]["text"]


def test_resume_refuses_other_data_batch_or_unwritable_dir(tmp_path: Path) -> None:
    folder = str(tmp_path)
    make_trainer(folder, 1, run_dir=f"{folder}/a", max_steps=4).fit(DataLoader(problem(), shuffle=True))
    again = {"resume_from_checkpoint": True}
    with pytest.raises(CheckpointError, match="has 90 samples an epoch, this data has 91"):
        make_trainer(folder, 1, run_dir=f"{folder}/b", **again).fit(DataLoader(problem(91), shuffle=True))
    with pytest.raises(CheckpointError, match="stands 12 samples into an epoch, and batches are of 5"):
        make_trainer(folder, 1, run_dir=f"{folder}/c", batch_size=5, **again).fit(DataLoader(problem(), shuffle=True))
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    with pytest.raises(CheckpointError):
        make_trainer(folder, 1, run_dir=f"{folder}/d", checkpoint_dir=str(unwritable / "x")).fit(problem())


def test_damaged_checkpoint_is_reported_and_older_one_resumed(tmp_path: Path) -> None:
    folder = str(tmp_path)
    make_trainer(folder, 1, run_dir=f"{folder}/a", checkpoint_frequency="5 steps", max_steps=20).fit(problem())
    (tmp_path / "checkpoints" / "step-000020" / "manifest.json").write_bytes(b"{}")
    history = make_trainer(folder, 1, run_dir=f"{folder}/b", resume_from_checkpoint=True).fit(problem())
    events = (tmp_path / "b" / "events.jsonl").read_text()
    assert "passed over" in events
    assert "step-000020" in events
    assert '"first_step":15' in events
    assert history.steps == 60


def manifests(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/manifest.json"))


def test_checkpoints_are_taken_when_they_are_due(tmp_path: Path) -> None:
    """Also where a step of an epoch's end is due, and the best by a metric is kept beside the last."""
    every = {"batch_size": 30, "epochs": 4, "run_dir": f"{tmp_path}/a", "checkpoint_frequency": "3 steps"}
    make_trainer(f"{tmp_path}/a", 1, **every).fit(problem(), problem())  # three steps an epoch
    assert manifests(tmp_path / "a" / "checkpoints") == [3, 6, 9, 12]
    best = {"batch_size": 30, "epochs": 4, "run_dir": f"{tmp_path}/b", "keep_last": 1, "keep_best": "max:val_loss"}
    make_trainer(f"{tmp_path}/b", 1, **best).fit(problem(), problem())
    assert manifests(tmp_path / "b" / "checkpoints") == [3, 12], "the first epoch has the highest loss"


def plateau_run(folder: str) -> list[bool]:
    """A scheduler that looks at the epoch's training loss, resumed in the middle of an epoch."""

    def train(name: str, **more: Any) -> torch.Tensor:
        options = {
            "epochs": 4,
            "run_dir": f"{folder}/{name}",
            "checkpoint_dir": f"{folder}/{name[0]}",
            "log_every_n_steps": 4,
        }
        trainer = make_trainer(folder, 2, **options | more)
        trainer._task.scheduler = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.2
        )
        trainer.fit(DataLoader(problem(), shuffle=True))
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    whole = train("whole")
    train("cut", max_steps=37)
    return [torch.equal(whole, train("cut-again", resume_from_checkpoint=True)), True]


def test_plateau_scheduler_survives_a_resume(tmp_path: Path) -> None:
    assert run_ranks(plateau_run, 2, str(tmp_path)) == [[True, True]] * 2


def unsynced_run(folder: str) -> list[Any]:
    """BatchNorm of its own on every rank: what is saved is rank 0's, and a resume begins with it."""
    torch.manual_seed(0)
    parts: dict[str, Any] = {
        "num_gpus": 2,
        "batch_size": 3,
        "progress": False,
        "sync_batchnorm": False,
        "drop_last": True,
    }

    def train(name: str, **more: Any) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 300), nn.BatchNorm1d(300), nn.Linear(300, 300), nn.Linear(300, 2))
        trainer = Trainer(model, checkpoint_dir=f"{folder}/{name[0]}", epochs=2, **parts | more)
        trainer.fit(DataLoader(problem(), shuffle=True))
        return trainer

    whole = train("whole", checkpoint_frequency="4 steps")
    again = train("second", resume_from_checkpoint=f"{folder}/w/step-000004")
    assert again.history is not None
    same = all(
        torch.equal(a, b)
        for a, b in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    )
    return [same, [verdict["passed"] for verdict in verdicts(again.history.run_dir)]]


def test_buffers_that_differ_between_ranks_resume_as_rank_0s(tmp_path: Path) -> None:
    assert run_ranks(unsynced_run, 2, str(tmp_path)) == [[True, [True]]] * 2
