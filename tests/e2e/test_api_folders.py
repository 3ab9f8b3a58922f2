"""Run directories and checkpoint folders of several runs: nothing of another is lost, and nothing secret is told."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import History, Trainer
from distributed.core.errors import CheckpointError, LaunchError, RankFailedError
from distributed.core.locks import Owner
from distributed.core.run_dir import LOCK
from distributed.launch.run_lock import owned


class Taken(TensorDataset):
    """Another run takes the checkpoint folder once something is there."""

    def __init__(self, folder: Path, awaited: str) -> None:
        super().__init__(torch.randn(160, 3), torch.randn(160, 1))
        self.folder, self.awaited = folder, awaited

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if (self.folder / self.awaited).exists():
            (self.folder / LOCK).write_bytes(replace(Owner.me("theirs"), host="another").to_text())
        return super().__getitem__(index)


def fit(place: Path, name: str, steps: int, data: TensorDataset | None = None, **more: Any) -> History:
    torch.manual_seed(0)
    options = {
        "num_gpus": 1,
        "batch_size": 4,
        "progress": False,
        "checkpoint_frequency": "5 steps",
        "checkpoint_dir": str(place / "kept"),
        "run_dir": str(place / name),
        "device": "cpu",
        "certificate_steps": 0,
    }
    data = data or TensorDataset(torch.randn(160, 3), torch.randn(160, 1))
    return Trainer(nn.Linear(3, 1), loss_fn=nn.MSELoss(), max_steps=steps, **options | more).fit(data)


def kept(place: Path) -> list[str]:
    return sorted(path.parent.name for path in (place / "kept").glob("step-*/manifest.json"))


def test_run_resumed_from_old_step_keeps_first_runs_checkpoints(tmp_path: Path) -> None:
    fit(tmp_path, "first", 30)
    before = kept(tmp_path)
    start = str(tmp_path / "kept" / "step-000005")
    history = fit(tmp_path, "back", 20, keep_last=2, resume_from_checkpoint=start)
    line = Path(history.checkpoint).name.removeprefix("step-000020-")
    assert kept(tmp_path) == sorted([*before, f"step-000015-{line}", f"step-000020-{line}"])
    more = fit(tmp_path, "more", 25, keep_last=2, resume_from_checkpoint=True)
    assert Path(more.checkpoint).name == f"step-000025-{line}", "it goes on with what was written last"
    assert kept(tmp_path) == sorted([*before, f"step-000020-{line}", f"step-000025-{line}"])


def test_requeued_run_applies_keep_last_to_all_checkpoints(tmp_path: Path) -> None:
    fit(tmp_path, "run", 12, keep_last=2)
    history = fit(tmp_path, "run", 22, keep_last=2, resume_from_checkpoint=True)
    assert kept(tmp_path) == ["step-000020", "step-000022"]
    assert history.steps == 22


@pytest.mark.parametrize("ranks", [1, 2])
def test_new_run_refuses_checkpoint_dir_of_another_run(tmp_path: Path, ranks: int) -> None:
    fit(tmp_path, "first", 5)
    with pytest.raises(LaunchError, match="holds another run: the checkpoint step-000005"):
        fit(tmp_path, "second", 3, num_gpus=ranks)
    assert kept(tmp_path) == ["step-000005"]
    assert not (tmp_path / "second").exists()


def test_locked_folder_is_refused_before_any_write(tmp_path: Path) -> None:
    with owned(tmp_path / "run", resume=False), pytest.raises(LaunchError, match="is in use by process"):
        fit(tmp_path, "run", 3)
    assert list((tmp_path / "run").iterdir()) == []
    with owned(tmp_path / "kept", resume=False), pytest.raises(CheckpointError, match="is in use by process"):
        fit(tmp_path, "run", 3)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == []
    assert not list(tmp_path.rglob(LOCK))


def test_run_with_stolen_lock_saves_nothing_without_restart(tmp_path: Path) -> None:
    data = Taken(tmp_path / "kept", "step-000005/manifest.json")
    with pytest.raises(RankFailedError, match="taken by another run") as ended:
        fit(tmp_path, "run", 200, data, num_gpus=2, keep_last=1, checkpoint_async=False)
    assert ended.value.exit_code == CheckpointError.exit_code
    assert [path.name for path in (tmp_path / "run" / "attempts").iterdir()] == ["0"]
    assert kept(tmp_path) == ["step-000005"]
    assert json.loads((tmp_path / "kept" / LOCK).read_text())["token"] == "theirs"


def test_run_with_stolen_lock_stops_before_its_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.core.locks.BEAT_S", 0.01)
    data, endless = Taken(tmp_path / "kept", LOCK), 10**9
    with pytest.raises(CheckpointError, match="taken by another run"):
        fit(tmp_path, "run", endless, data, epochs=endless, checkpoint_frequency=f"{endless} steps")
    assert kept(tmp_path) == []


def test_run_files_are_private_and_hold_no_secret(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(0o755)  # the user's own choice
    fit(tmp_path, "run", 5, mlflow_tracking_uri="postgresql://me:hunter2@host/db?sslmode=require&password=hunter2")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"postgresql://me:***@host/db?sslmode=require&password=***" in path.read_bytes() for path in files)
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    exposed = [path for path in run.iterdir() if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert exposed == []
    assert stat.S_IMODE((run / "attempts" / "0").stat().st_mode) == 0o700
