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


def test_twenty_histories_of_kills_end_with_the_same_bytes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_histories.py")
    command = [sys.executable, str(script), str(tmp_path / "kills"), "--histories", "20"]
    result = subprocess.run(
        command, env=clean_environ(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=280
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 20, result.stderr
    assert [row for row in rows if not row["same"]] == []
    assert sum(row["kills"] for row in rows) >= 20
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
    import distributed.train.state as state
    from distributed.data.loader import TrainLoader
    from distributed.strategies.torch_mesh import TorchMesh

    if name == "rng of one rank":
        restore = state.restore_rng

        def restore_wrongly(saved: Any, device: torch.device) -> None:
            restore(saved, device)
            if torch.distributed.get_rank() == 1:
                torch.manual_seed(7)

        state.restore_rng = restore_wrongly
    elif name == "sampler off by one batch":
        epoch = TrainLoader.epoch
        TrainLoader.epoch = lambda self, number, first=0: epoch(self, number, first + (first > 0))  # type: ignore[method-assign]
    elif name in ("scaler not restored", "optimizer step count"):
        load = TorchMesh.load_state

        def load_wrongly(self: TorchMesh, tree: dict[str, Any]) -> None:
            if name == "scaler not restored":
                tree = {key: value for key, value in tree.items() if key != "scaler"}
            load(self, tree)
            if name == "optimizer step count":
                for held in self.optimizer.state.values():
                    held["step"] += 1

        TorchMesh.load_state = load_wrongly  # type: ignore[method-assign]


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
def test_the_certificate_names_what_a_broken_resume_lost(bug: str, component: str, tmp_path: Path) -> None:
    for same, found in run_ranks(resumed_run, 2, str(tmp_path), 2, bug):
        assert not same or bug == "scaler not restored"
        assert [verdict["component"] for verdict in found] == [component], found
        assert "FAIL" in found[0]["text"]


def test_resume_refuses_what_would_be_another_run(tmp_path: Path) -> None:
    folder = str(tmp_path)
    make_trainer(folder, 1, run_dir=f"{folder}/a", max_steps=4).fit(DataLoader(problem(), shuffle=True))
    again = {"resume_from_checkpoint": True}
    with pytest.raises(CheckpointError, match="knows 90 samples an epoch, this data has 91"):
        make_trainer(folder, 1, run_dir=f"{folder}/b", **again).fit(DataLoader(problem(91), shuffle=True))
    with pytest.raises(CheckpointError, match="stands 12 samples into an epoch, and batches are of 5"):
        make_trainer(folder, 1, run_dir=f"{folder}/c", batch_size=5, **again).fit(DataLoader(problem(), shuffle=True))
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    with pytest.raises(CheckpointError):
        make_trainer(folder, 1, run_dir=f"{folder}/d", checkpoint_dir=str(unwritable / "x")).fit(problem())


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    folder = str(tmp_path)
    make_trainer(folder, 1, run_dir=f"{folder}/a", checkpoint_frequency="5 steps", max_steps=20).fit(problem())
    (tmp_path / "checkpoints" / "step-000020" / "manifest.json").write_bytes(b"{}")
    history = make_trainer(folder, 1, run_dir=f"{folder}/b", resume_from_checkpoint=True).fit(problem())
    events = (tmp_path / "b" / "events.jsonl").read_text()
    assert "passed over" in events
    assert "step-000020" in events
    assert '"first_step":15' in events
    assert history.steps == 60
