"""TensorBoard files, read back by TensorBoard itself."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.core.events import EpochEnded, EvaluationEnded, RunEnded, RunStarted, StepEnded

pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from distributed.observe.tensorboard import TensorBoardObserver


def started(first_step: int = 0) -> RunStarted:
    return RunStarted(
        time=1.0,
        run_dir="runs/one",
        world_size=2,
        device="cpu",
        backend="pytorch-ddp",
        epochs=1,
        steps_per_epoch=10,
        total_steps=10,
        first_step=first_step,
        global_batch=64,
        settings={"epochs": 1, "momentum": None},
        decisions=["gloo: no GPU here [communication_backend]"],
    )


def stepped(step: int, loss: float = 0.5) -> StepEnded:
    return StepEnded(
        time=10.0 + step,
        step=step,
        epoch=0,
        loss=loss,
        learning_rate=0.1,
        samples_per_second=100.0,
        gradient_norm=2.0,
        device_utilization=55.0,
        metrics={"accuracy": 0.25},
    )


def evaluated(step: int) -> EvaluationEnded:
    return EvaluationEnded(time=30, step=step, epoch=0, seconds=1, metrics={"val_loss": 0.75, "val_accuracy": 0.875})


def epoch_ended(step: int) -> EpochEnded:
    metrics = {"loss": 0.625, "val_loss": 0.75}
    return EpochEnded(time=31, epoch=0, step=step, seconds=4, samples=640, samples_per_second=160, metrics=metrics)


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = read(folder)
    return {tag: [(s.step, round(s.value, 6)) for s in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_back_the_runs_scalars(tmp_path: Path) -> None:
    observer = TensorBoardObserver(tmp_path)
    end = RunEnded(time=40, status="done", step=10, seconds=9, samples_per_second=70)
    for event in (started(), stepped(5), stepped(10, loss=0.25), evaluated(10), epoch_ended(10), end):
        observer.on(event)
    observer.close()
    assert scalars(tmp_path) == {
        "train/loss": [(5, 0.5), (10, 0.25)],
        "train/accuracy": [(5, 0.25), (10, 0.25)],
        "train/learning_rate": [(5, 0.1), (10, 0.1)],
        "train/gradient_norm": [(5, 2.0), (10, 2.0)],
        "train/samples_per_second": [(5, 100.0), (10, 100.0)],
        "device/utilization": [(5, 55.0), (10, 55.0)],
        "val/loss": [(10, 0.75)],
        "val/accuracy": [(10, 0.875)],
        "epoch/loss": [(10, 0.625)],
        "epoch/seconds": [(10, 4.0)],
        "epoch/samples_per_second": [(10, 160.0)],
    }
    accumulator = read(tmp_path)
    assert accumulator.Scalars("train/loss")[0].wall_time == 15.0
    summary = make_ndarray(accumulator.Tensors("run/summary")[0].tensor_proto).item(0).decode()
    assert "gloo: no GPU here [communication_backend]" in summary
    assert "runs/one" in summary
    assert "momentum" not in summary  # nobody set it


def test_tensorboard_values_are_on_disk_before_close(tmp_path: Path) -> None:
    observer = TensorBoardObserver(tmp_path)
    observer.on(stepped(5, loss=math.nan))
    found = read(tmp_path).Scalars("train/loss")
    assert len(found) == 1
    assert math.isnan(found[0].value)
    observer.close()


def test_epoch_without_step_events_still_has_its_loss(tmp_path: Path) -> None:
    observer = TensorBoardObserver(tmp_path)
    observer.on(epoch_ended(10))
    observer.close()
    found = scalars(tmp_path)
    assert found["train/loss"] == found["epoch/loss"] == [(10, 0.625)]
    assert found["val/loss"] == [(10, 0.75)]


def test_resumed_run_replaces_values_after_its_checkpoint(tmp_path: Path) -> None:
    killed = TensorBoardObserver(tmp_path)
    for event in (started(), stepped(5), stepped(6), stepped(7)):
        killed.on(event)
    resumed = TensorBoardObserver(tmp_path)
    for event in (started(first_step=5), stepped(6, loss=0.125)):
        resumed.on(event)
    killed.close()
    resumed.close()
    assert scalars(tmp_path)["train/loss"] == [(5, 0.5), (6, 0.125)]


def test_tensorboard_observer_imports_no_tensorflow_or_torch(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("tensorflow", "torch"):
        (trap / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write('{name}')\nraise SystemExit(9)\n"
        )
    script = (
        "import sys\n"
        "from distributed.core.events import StepEnded\n"
        "from distributed.observe.observers import OBSERVERS\n"
        "observer = OBSERVERS.load('tensorboard')(sys.argv[1])\n"
        "observer.on(StepEnded(time=0, step=1, epoch=0, loss=0.5, learning_rate=1, samples_per_second=1))\n"
        "observer.close()\n"
        "assert not {'tensorflow', 'torch'} & set(sys.modules)\n"
    )
    env = os.environ | {"PYTHONPATH": str(trap)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "logs")], env=env, check=True)
    assert not (tmp_path / "imported").exists()
    assert scalars(tmp_path / "logs")["train/loss"] == [(1, 0.5)]
