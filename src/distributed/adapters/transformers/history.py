"""A run's history in the words of transformers: `log_history`, the mean loss, and the best model of it."""

from __future__ import annotations

from typing import Any

from distributed.checkpoint.exchange.catalog import list_checkpoints
from distributed.core.errors import CheckpointError, ConfigError
from distributed.core.events import EvaluationEnded, EventTail, RunStarted, StepEnded
from distributed.core.history import History
from distributed.core.plan import Plan
from distributed.core.run_dir import RunDir
from distributed.train.task import Task
from distributed.trainers.trained.model import load_trained_task


def log_history(history: History) -> list[dict[str, Any]]:
    """The numbers of each logged step, and those of each evaluation, with `eval_` before their names."""
    found: list[dict[str, Any]] = []
    per_epoch: int | None = None
    for event in EventTail(RunDir(history.run_dir).events, from_end=False).read():
        if isinstance(event, RunStarted):
            per_epoch = event.steps_per_epoch
            found = [row for row in found if row["step"] <= event.first_step]  # the others are taken again
        elif isinstance(event, StepEnded):
            row = {"loss": event.loss, "step": event.step, **event.metrics}
            row |= {} if event.gradient_norm is None else {"grad_norm": event.gradient_norm}
            found.append(row | ({"epoch": event.step / per_epoch} if per_epoch else {}))
        elif isinstance(event, EvaluationEnded):
            epoch = event.step / per_epoch if per_epoch else event.epoch + 1.0
            evaluated = {_theirs(name): value for name, value in event.metrics.items()}
            found.append(evaluated | {"step": event.step, "epoch": epoch})
    return found


def mean_loss(rows: list[dict[str, Any]]) -> float:
    """Over the steps of a `log_history`.

    >>> mean_loss([{"loss": 3.0, "step": 1}, {"loss": 1.5, "step": 3}])
    2.0
    """
    total, before = 0.0, 0
    for row in rows:
        if "loss" in row:
            total, before = total + row["loss"] * (row["step"] - before), row["step"]
    return total / before if before else float("nan")


def load_best(task: Task, history: History, metric: str) -> tuple[float, str]:
    """Give the model the weights with the best value of a metric; the value, and the path of their checkpoint."""
    direction, _, name = metric.partition(":")
    plan = Plan.read(history.run_dir)
    values = {record.step: record.metrics[name] for record in history.evaluations if name in record.metrics}
    if not values:
        raise ConfigError(
            f"load_best_model_at_end, and no evaluation has measured {name}",
            why=f"the run has measured {', '.join(history.metrics) or 'no metrics'}",
            do="metric_for_best_model= one of them, without val_",
        )
    best = (max if direction == "max" else min)(values, key=values.__getitem__)  # of equal ones the first
    row = next((row for row in list_checkpoints(plan.checkpoint.dir).rows if row.step == best), None)
    if row is None:
        raise CheckpointError(
            f"load_best_model_at_end, and there is no checkpoint of step {best} in {plan.checkpoint.dir}",
            why="the state of the best evaluation was not saved, or is saved no longer",
            do="give save_strategy (and save_steps) the value of eval_strategy (and eval_steps)",
        )
    load_trained_task(task, plan, row.path)
    return values[best], row.path


def _theirs(name: str) -> str:
    return f"eval_{name.removeprefix('val_').removeprefix('val/')}"
