"""metrics.csv: one row a step, new columns when something new is measured, no row twice after a resume."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from distributed.core.events import EpochEnded, EvaluationEnded, RunStarted, StepEnded
from distributed.observe.csv_log import CsvLog


def started(first_step: int) -> RunStarted:
    return RunStarted(
        time=0.0,
        run_dir="",
        world_size=2,
        device="cpu",
        backend="pytorch-ddp",
        epochs=2,
        steps_per_epoch=4,
        total_steps=8,
        first_step=first_step,
        global_batch=8,
    )


def step(number: int, loss: float, **metrics: float) -> StepEnded:
    more: dict[str, Any] = {"learning_rate": 0.1, "samples_per_second": 1.0}
    return StepEnded(time=0.0, step=number, epoch=(number - 1) // 4, loss=loss, metrics=metrics, **more)


def evaluated(number: int, loss: float) -> EvaluationEnded:
    return EvaluationEnded(time=0.0, step=number, epoch=0, seconds=1.0, metrics={"loss": loss})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_a_step_are_one_and_columns_are_added(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "metrics.csv")
    log.on(started(0))
    log.on(step(2, 0.75))
    log.on(step(4, 0.5, accuracy=0.25))
    assert rows(log.path)[1]["accuracy"] == "0.25", "whole after each event"
    log.on(evaluated(4, 0.625))
    log.on(
        EpochEnded(time=0.0, epoch=0, step=4, seconds=2.0, samples=32, samples_per_second=16.0, metrics={"gap": 9.0})
    )
    log.close()
    first, last = rows(log.path)
    assert (first["step"], first["loss"], first["accuracy"], first["val_loss"]) == ("2", "0.75", "", "")
    assert (last["loss"], last["val_loss"], last["epoch"], last["epoch_gap"]) == ("0.5", "0.625", "0", "9.0")


def test_resumed_run_appends_without_repeating_rows(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "metrics.csv")
    log.on(started(0))
    for number in (1, 2, 3, 4):
        log.on(step(number, 1 / 3 * number))
    log.on(evaluated(4, 0.123456789))
    with log.path.open("a") as file:
        file.write("5,1,0.")  # of a machine that went down
    again = CsvLog(log.path)
    again.on(started(3))
    again.on(step(4, 0.5))
    again.on(evaluated(4, 0.1))
    again.on(started(4))  # the world broke in the evaluation, which is made again
    again.on(evaluated(4, 0.25))
    again.on(step(5, 0.5))
    found = rows(log.path)
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5"]
    assert (found[3]["loss"], found[3]["val_loss"]) == ("0.5", "0.25")
    again.on(started(0))
    assert rows(log.path) == [], "another run begins"
