"""An evaluation in this process alone, after a training or before one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from distributed.adapters.transformers.models import shifts_labels
from distributed.adapters.transformers.predictions import CollectedPredictions
from distributed.adapters.transformers.task import HfTask, count_of
from distributed.core.errors import TaskError
from distributed.data.loading.transfer import to_device
from distributed.strategies.checks.sharded_models import is_in_parts
from distributed.strategies.model.modes import evaluating


def evaluate(task: HfTask, data: DataLoader[Any], predictions: CollectedPredictions) -> tuple[float | None, int]:
    """The mean loss over the targets that count, if the data has some, and the samples; `predictions` has the rest."""
    model: Any = task.model
    if is_in_parts(model):
        raise TaskError(
            "evaluate() of a model that is sharded",
            why="this process has parts of it",
            do="whole_model_on='all', or eval_strategy='epoch', which evaluates in the training",
        )
    device, is_shifted = next(model.parameters()).device, shifts_labels(model)
    total, weight, samples = 0.0, 0.0, 0
    predictions.reset()
    task.samples = 0  # the task itself collects nothing
    with evaluating(model), torch.no_grad():
        for batch in data:
            moved = to_device(batch, device)
            labels, size = moved.get("labels"), len(next(iter(moved.values())))
            samples += size
            if labels is None:
                outputs = model(**moved)
            else:
                outcome = task.evaluate(model, moved)
                outputs = outcome.outputs
                has_classes = labels.dim() > 1 and not labels.is_floating_point()
                counted = float(count_of(labels, is_shifted=is_shifted)) if has_classes else float(size)
                total, weight = total + float(outcome.loss) * counted, weight + counted
            predictions.add(outputs, moved)
    return (total / weight if weight else None), samples
