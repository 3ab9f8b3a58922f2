"""What ends a run or is kept of it: time, the best checkpoints, and a table of its numbers."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.callbacks import EMA
from distributed.checkpoint.restore.reading import load
from distributed.core.config import DistributedConfig
from distributed.core.errors import CheckpointError, ConfigError
from distributed.core.history import History
from distributed.testing import run_ranks
from tests.meshes import MESHES, make_data, make_model

MESHES_OF_TWO = ("ddp", "fsdp_grad_op", "tp", "pp")


def problem(samples: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_trainer(folder: str, *callbacks: Callback, ranks: int = 1, **more: Any) -> Trainer:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_gpus": ranks, "batch_size": 4 // ranks, "epochs": 6, "progress": False}
    options |= {"run_dir": folder, "device": "cpu", "optimizer": "sgd", "learning_rate": 0.1}
    return Trainer(nn.Linear(5, 2), callbacks=callbacks, **options | more)


class Clock(Callback):
    """Waits in each step; on rank 1, whose clock does not count, for long before the first."""

    def on_epoch_start(self, run: Any) -> None:
        time.sleep(1.0 * (run.rank == 1 and run.epoch == 0))

    def on_step_end(self, run: Any) -> None:
        time.sleep(0.1)


def run_for(folder: str) -> list[tuple[int, str]]:
    found = []
    for limit in ("1.5s", "1.5s", "100s"):
        ends: dict[str, Any] = {"max_time": limit, "resume_from_checkpoint": bool(found), "log_every_n_steps": 1}
        trainer = make_trainer(folder, Clock(), ranks=2, checkpoint_dir=f"{folder}/kept", **ends)
        history = trainer.fit(DataLoader(problem()))
        found.append((history.steps, history.stopped))
    return found


def test_run_ends_in_time_and_resumes_with_what_is_left(tmp_path: Path) -> None:
    """By rank 0's clock, over all parts of the run."""
    for first, second, third in run_ranks(run_for, 2, str(tmp_path)):
        assert 0 < first[0] < 24
        assert "it has trained for max_time=1.5s [max_time]" in first[1]
        assert second[0] == first[0], "nothing is left"
        assert third == (24, "")


class Worsens(Callback):
    """Logs a metric that is the best after the third epoch, and shifts the weights so that each epoch's can be told."""

    values = (0.1, 0.5, 0.9, 0.8, 0.7, 0.2)

    def on_epoch_end(self, run: Any, metrics: Any) -> None:
        run.log("f1", self.values[run.epoch])


class Saturates(Worsens):
    """Its metric stays at its best, as an accuracy of 1 does."""

    values = (0.1, 0.9, 0.9, 0.9, 0.7, 0.9)


def kept(history: History) -> list[int]:
    folder = Path(history.checkpoint).parent
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/manifest.json"))


def test_best_checkpoints_are_kept_and_the_best_is_loaded(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"keep_best": "max:f1", "keep_best_k": 2, "keep_last": 1}
    trainer = make_trainer(str(tmp_path / "run"), Worsens(), EMA(0.5), ranks=2, **settings)
    history = trainer.fit(DataLoader(problem()))
    assert kept(history) == [12, 16, 24]
    last = trainer.model.weight.clone()
    best = trainer.load_best()
    assert (best.step, best.epoch, best.metric, best.value) == (12, 2, "f1", 0.9)
    saved = load(best.path, ranks=()).shared
    assert torch.equal(trainer.model.weight, saved["model"]["weight"])
    assert not torch.equal(trainer.model.weight, last)
    trainer.load_best(averaged=True)
    assert torch.equal(trainer.model.weight, saved["copies"]["EMA"]["weight"])
    with pytest.raises(CheckpointError, match=r"best loss.*is not there|no checkpoint of this run"):
        trainer.load_best("max:loss")
    with pytest.raises(CheckpointError, match="no checkpoint of the run has a finite val_loss"):
        trainer.load_best("val_loss")
    with pytest.raises(CheckpointError, match="least or the most f1"):
        trainer.load_best("f1")


def test_first_of_equally_good_checkpoints_is_kept_and_loaded(tmp_path: Path) -> None:
    trainer = make_trainer(str(tmp_path / "run"), Saturates(), keep_best="max:f1", keep_last=1)
    history = trainer.fit(DataLoader(problem()))
    steps = history.steps // 6
    assert kept(history) == [2 * steps, 6 * steps]
    assert trainer.load_best().epoch == 1
    loaded = trainer.model.weight.clone()
    trainer.load_checkpoint("best")
    assert torch.equal(trainer.model.weight, loaded)


def load_best_of_meshes(folder: str) -> dict[str, bool]:
    """On rank 0, which has the whole model after a run that has cut it."""
    found = {}
    for name in MESHES_OF_TWO:
        trainer = Trainer(
            make_model(),
            loss_fn=nn.CrossEntropyLoss(),
            epochs=3,
            learning_rate=0.5,
            optimizer="sgd",
            progress=False,
            device="cpu",
            checkpoint_dir=f"{folder}/{name}",
            **MESHES[name].all_settings(),
        )
        history = trainer.fit(make_data(), make_data(13))
        best = trainer.load_best("max:val_loss")
        assert best.value == max(history["val_loss"])
        saved = load(best.path, ranks=()).shared["model"]
        if trainer.is_main:
            found[name] = all(torch.equal(value, saved[key]) for key, value in trainer.model.state_dict().items())
    return found


def test_best_weights_are_loaded_after_any_mesh(tmp_path: Path) -> None:
    same = run_ranks(load_best_of_meshes, 2, str(tmp_path))[0]
    assert same == dict.fromkeys(MESHES_OF_TWO, True)


def test_table_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    often: dict[str, Any] = {"csv": True, "log_every_n_steps": 2, "ranks": 2, "checkpoint_dir": str(tmp_path / "kept")}
    make_trainer(str(tmp_path / "run"), max_steps=7, **often).fit(DataLoader(problem()), problem(6))
    again = make_trainer(str(tmp_path / "run"), resume_from_checkpoint=True, **often)
    history = again.fit(DataLoader(problem()), problem(6))
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps))
    assert set(range(2, 25, 2)) <= set(steps)
    measured = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert measured == history["val_loss"], "that after step 7 is one of them"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_time": "soon"}, "should be a time with its units"),
        ({"max_time": 3600}, "max_time"),
        ({"keep_best_k": 3}, "keep_best_k is set, but would have no effect"),
        ({"keep_every": 3}, "keep_every is set without keep_last"),
        ({"keep_best": "val_loss", "keep_best_k": 3}, "keep_best_k is set without keep_last"),
        ({"keep_best": "val_loss", "keep_last": 1, "keep_best_k": 0}, "keep_best_k"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DistributedConfig(**settings)
    assert said in str(refused.value)
