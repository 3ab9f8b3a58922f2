"""When a run validates within its epochs, what it saves then, and how it resumes in between; on one rank."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Callback, Task, Trainer
from distributed.checkpoint.exchange.catalog import list_checkpoints
from distributed.checkpoint.exchange.choosing import open_chosen
from distributed.core.errors import CallbackError
from distributed.core.events import EpochEnded, EvaluationEnded
from distributed.core.history import EvaluationRecord, History
from distributed.core.plan import BatchPlan, Plan, ValidationPlan
from distributed.observe.console import Console
from distributed.observe.scalars import ScalarReader
from distributed.train.progress import Due, EpochSteps, Progress

STEPS, EPOCHS = 6, 3  # steps of an epoch


def make_data(samples: int = 4 * STEPS - 1, seed: int = 0) -> TensorDataset:  # the last step is short
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator))


class Breaks(Callback):
    """Fails after a step, or within the validation after it."""

    def __init__(self, step: int, *, in_validation: bool = False) -> None:
        self.step, self.in_validation = step, in_validation

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step and not self.in_validation:
            raise RuntimeError("power cut")

    def on_validation_start(self, run: Any) -> None:
        if run.step == self.step and self.in_validation:
            raise RuntimeError("power cut")


class Stops(Callback):
    """As a signal that comes in the validation after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_start(self, run: Any) -> None:
        if run.step == self.step:
            signal.raise_signal(signal.SIGTERM)


class Reads(Callback):
    """What most do after a validation."""

    def on_validation_end(self, run: Any, metrics: Any) -> None:
        assert metrics["val_loss"] > 0


def fit(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    options = {"num_gpus": 1, "batch_size": 4, "epochs": EPOCHS, "progress": False, "run_dir": folder, "device": "cpu"}
    options |= {"checkpoint_frequency": "1 validation", "keep_best": "val_loss", "keep_last": 2}
    trainer = Trainer(
        model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss_fn=nn.MSELoss(),
        callbacks=callbacks,
        **options | settings,
    )
    trainer.fit(make_data(), make_data(10, seed=1))
    return trainer


class SavesEpochs(Callback):
    def on_epoch_end(self, run: Any, metrics: Any) -> None:
        run.save()


def test_best_checkpoint_is_that_of_a_step_that_was_validated(tmp_path: Path) -> None:
    """Not of an epoch that ends later, whose metrics are those of its newest validation."""
    trainer = fit(tmp_path, SavesEpochs(), val_check_interval=5, keep_best="max:val_loss")
    assert trainer.history is not None
    best = max(trainer.history.evaluations, key=lambda record: record.metrics["val_loss"])
    assert best.step % 6, "it is within an epoch"
    found = trainer.load_best()
    assert (found.step, found.epoch, found.value) == (best.step, best.epoch, best.metrics["val_loss"])
    assert open_chosen(str(tmp_path), "best").path == found.path


def steps_of(history: History | None) -> list[int]:
    assert history is not None
    return [record.step for record in history.evaluations]


def without_time(history: History | None) -> list[tuple[Any, ...]]:
    assert history is not None
    return [(record.step, record.epoch, record.metrics) for record in history.evaluations]


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        (None, [6, 12, 18]),
        (1.0, [6, 12, 18]),
        (0.5, [3, 6, 9, 12, 15, 18]),
        (0.4, [3, 5, 6, 9, 11, 12, 15, 17, 18]),
        (4, [4, 8, 12, 16, 18]),
        ("6 steps", [6, 12, 18]),
        ("2 epochs", [12, 18]),
        ("5 minutes", [18]),
    ],
)
def test_interval_says_after_which_steps_is_validated(interval: Any, steps: list[int], tmp_path: Path) -> None:
    history = fit(tmp_path, val_check_interval=interval).history
    assert steps_of(history) == steps
    assert history is not None
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "EvaluationEnded"] == steps
    last = {record.epoch: record.metrics for record in history.evaluations}  # of an epoch, the newest
    for record in history.epochs:
        measured = {name: value for name, value in record.metrics.items() if name.startswith("val_")}
        assert measured == last.get(record.epoch, {})
    checkpoints = list_checkpoints(str(tmp_path)).rows
    best = min(history.evaluations, key=lambda record: record.metrics["val_loss"]).step
    assert {row.step for row in checkpoints} == {*steps[-2:], best}
    assert [row.step for row in checkpoints if row.is_best] == [best]


@pytest.mark.parametrize(
    "breaks",
    [Breaks(5), Breaks(8), Breaks(10), Breaks(8, in_validation=True), Breaks(12, in_validation=True)],
    ids=["before the first", "at one", "between two", "within one", "within that of an epoch's end"],
)
def test_resumed_run_validates_as_the_undisturbed_one(breaks: Breaks, tmp_path: Path) -> None:
    settings = {"val_check_interval": 4, "checkpoint_frequency": "2 steps", "keep_best": None, "keep_last": None}
    whole = fit(tmp_path / "whole", **settings)
    with pytest.raises(CallbackError, match="power cut"):
        fit(tmp_path / "cut", breaks, **settings)
    again = fit(tmp_path / "cut", resume_from_checkpoint=True, **settings)
    assert without_time(again.history) == without_time(whole.history)
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("step", "interval"), [(8, 4), (12, 1.0)])
def test_validation_cut_short_by_a_stop_is_made_up_for(step: int, interval: Any, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", val_check_interval=interval)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "cut", Stops(step), Reads(), val_check_interval=interval)
    stopped = History.load(tmp_path / "cut/history.json")
    assert (stopped.steps, stopped.interrupted) == (step, True)
    assert step not in steps_of(stopped)
    again = fit(tmp_path / "cut", val_check_interval=interval, resume_from_checkpoint=True)
    assert without_time(again.history) == without_time(whole.history)
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    rates = [trainer._task.optimizer.param_groups[0]["lr"] for trainer in (again, whole)]  # type: ignore[union-attr]
    assert rates[0] == rates[1]


def test_validation_within_an_epoch_is_shown_where_it_was() -> None:
    stream, reader = io.StringIO(), ScalarReader()
    console = Console(stream)
    within = EvaluationEnded(time=0, step=4, epoch=0, seconds=1, metrics={"a_loss": 0.5}, within_epoch=True)
    last = EvaluationEnded(time=0, step=6, epoch=0, seconds=1, metrics={"a_loss": 0.25})
    metrics = {"loss": 1.0, "val_a_loss": 0.25}
    closed = EpochEnded(time=0, epoch=0, step=9, seconds=1, samples=9, samples_per_second=9, metrics=metrics)
    for event in (within, last, closed):
        console.on(event)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[:3] for line in lines if "step" in line] == [["epoch 1", "step 4", "val_a_loss 0.5000"]]
    assert "val_a_loss 0.2500" in lines[-1]
    found = [reader.read(event) for event in (within, last, closed)]
    assert found[:2] == [(4, {"val_a_loss": 0.5}), (6, {"val_a_loss": 0.25})]
    assert found[2] is not None
    assert "val_a_loss" not in found[2][1], "each value once"


def due_of(every: float, unit: Any, now: list[float]) -> Due:
    plan = Plan("run", BatchPlan(8), epochs=4, validation=ValidationPlan(every, unit))
    return Due(plan, clock=lambda: now[0])


def test_minutes_between_validations_count_from_the_last() -> None:
    now = [0.0]
    due = due_of(10, "minutes", now)
    now[0] = 599
    assert not due.evaluation_minutes_are_over(lambda is_due: is_due)
    now[0] = 600
    assert due.evaluation_minutes_are_over(lambda is_due: is_due)
    assert due.evaluation_minutes_are_over(lambda is_due: True), "rank 0's word"
    due.evaluated()
    assert not due.evaluation_minutes_are_over(lambda is_due: is_due)
    assert not due.evaluate_in_epoch(600, EpochSteps(0, 0, 10))


def test_end_of_a_run_is_validated_once() -> None:
    due = due_of(5, "steps", [0.0])
    assert not due.evaluate_after_epoch(Progress(epoch=1, step=12), is_last=False)
    assert due.evaluate_after_epoch(Progress(epoch=3, step=24), is_last=False)
    assert due.evaluate_after_epoch(Progress(epoch=1, step=12), is_last=True)
    assert not due.evaluate_after_epoch(Progress(epoch=3, step=20, evaluated_at=20), is_last=False)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 10, 1000])
@pytest.mark.parametrize("part", [0.1, 0.25, 1 / 3, 0.5, 0.7])
def test_parts_of_an_epoch_end_where_they_are_over(part: float, length: int) -> None:
    within = EpochSteps(0, before=50, last=50 + length)
    found = [step - 50 for step in range(51, 51 + length) if within.is_part(step, part)]
    wanted = {-(-round(count * part * length * 1e6) // 10**6) for count in range(1, int(1 / part) + 2)}
    assert found == sorted(step for step in wanted if 0 < step < length)


def test_best_accuracy_counts_validations_within_epochs() -> None:
    within = EvaluationRecord(3, 0, 1.0, {"val_accuracy": 0.9})
    assert History(evaluations=(within,)).best_accuracy == 0.9


class Collects(Task):
    """Keeps what its validation step has seen, and a teacher."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.seen: list[int] = []
        self.teacher = nn.Linear(4, 1)

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def validation_step(self, model: nn.Module, batch: Any) -> Any:
        self.seen.append(len(batch[0]))
        self.last = len(self.seen)
        return nn.functional.mse_loss(self.teacher(batch[0]), batch[1])


def test_tried_validation_leaves_no_trace_in_the_task(tmp_path: Path) -> None:
    task = Collects(nn.Linear(4, 1))
    teacher, seen = task.teacher, task.seen
    trainer = Trainer(task, num_gpus=1, batch_size=4, epochs=2, progress=False, run_dir=tmp_path / "run", device="cpu")
    trainer.fit(make_data(), make_data(10, seed=1))
    assert task.seen is seen
    assert task.teacher is teacher
    assert seen == [4, 4, 2] * 2
    assert task.last == 6
