"""Evaluations that start ranks from a script: what comes back, and what a killed rank leaves."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed import Predictions, Trainer, whole_set
from distributed.core.errors import DataError, RankFailedError, TaskError

ROWS = 23


class Numbers(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2,), float(index)), torch.tensor(float(index))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) * self.weight


class Dies:
    """A predict step in which rank 1 is killed, once or always."""

    def __init__(self, folder: Path, *, once: bool) -> None:
        self.mark, self.once = str(folder / "died"), once

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, _ = batch
        is_first = not os.path.exists(self.mark)
        if os.environ.get("RANK") == "1" and inputs[0, 0] > 15 and (is_first or not self.once):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return model(inputs)


def trainer_of(folder: Path, **more: Any) -> Trainer:
    options = {"num_gpus": 2, "batch_size": 4, "progress": False, "device": "cpu", "run_dir": folder / "run"}
    return Trainer(Twice(), loss_fn=nn.MSELoss(), **options | more)


def test_script_measures_and_predicts_on_ranks_it_starts(tmp_path: Path) -> None:
    def spread(outputs: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
        return {"first": float(outputs[0]), "last": float(outputs[-1]), "rows": len(target)}

    trainer = trainer_of(tmp_path, metrics={"set": whole_set(spread)})
    wanted = 4 * torch.arange(float(ROWS))
    found = trainer.test({"all": Numbers()})
    loss = float((wanted - torch.arange(float(ROWS))).square().mean())
    assert found == pytest.approx(
        {"test_all_loss": loss, "test_all_set_first": 0.0, "test_all_set_last": 88.0, "test_all_set_rows": ROWS}
    )
    assert torch.equal(trainer.predict(DataLoader(Numbers(), batch_size=3, shuffle=True)), wanted)
    left = sorted(path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").glob("*/*"))
    assert "predict-1/predictions" not in left, "what was brought home is not kept twice"


class Made(nn.Module):
    """Makes numbers of torch's default type in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) * self.weight * torch.tensor(0.1) + float(torch.are_deterministic_algorithms_enabled())


def test_ranks_have_the_settings_of_torch_that_a_script_has_made(tmp_path: Path) -> None:
    options = {"batch_size": 4, "progress": False, "device": "cpu"}
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        one, two = (Trainer(Made(), num_gpus=n, run_dir=tmp_path / str(n), **options) for n in (1, 2))
        alone, shared = one.predict(Numbers()), two.predict(Numbers())
        assert torch.equal(alone, shared)
        assert alone[1] == 2 * 2 * 0.1 + 1
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_rank_killed_while_predicting_is_started_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, predict_step=Dies(tmp_path, once=True))
    found = trainer.predict(Numbers(), to=tmp_path / "rows")
    assert (tmp_path / "died").exists()
    assert [float(row) for row in found] == [4.0 * row for row in range(ROWS)]


def test_rank_that_stays_dead_leaves_no_predictions(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, predict_step=Dies(tmp_path, once=False), max_restarts=0)
    with pytest.raises(RankFailedError):
        trainer.predict(Numbers(), to=tmp_path / "rows")
    with pytest.raises(DataError, match="no whole predictions"):
        Predictions(tmp_path / "rows")
    trainer = trainer_of(tmp_path)
    assert len(trainer.predict(Numbers(), to=tmp_path / "rows")) == ROWS


def test_what_cannot_be_sent_to_an_evaluation_is_named(tmp_path: Path) -> None:
    data = Numbers()
    data.lock = threading.Lock()
    with pytest.raises(TaskError, match=r"predict_loader.dataset.lock cannot be sent to the ranks"):
        trainer_of(tmp_path).predict(data)
