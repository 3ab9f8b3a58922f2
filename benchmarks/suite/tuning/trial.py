"""The trial of the tuning benchmark: a small model for a fixed number of steps, with a note of when it ran."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed.core.atomic import replace_file

INPUTS, HIDDEN, CLASSES, BATCH = 64, 256, 10, 64
REPORTS = 5  # of a trial


def train_steps(steps: int, learning_rate: float, report: Callable[[dict[str, float]], None]) -> None:
    """SGD on random rows; what it learns is no matter."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
    model.append(nn.Linear(HIDDEN, CLASSES))
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=learning_rate), nn.CrossEntropyLoss()
    inputs, labels = torch.randn(BATCH, INPUTS), torch.randint(CLASSES, (BATCH,))
    for number in range(REPORTS):
        for _ in range(steps * number // REPORTS, steps * (number + 1) // REPORTS):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
        report({"loss": loss.item()})


def run_trial(config: Any, report: Callable[[dict[str, float]], None]) -> None:
    """A trial whose seconds are told by a file of its own, whoever runs it."""
    began = time.time()
    train_steps(config["steps"], config["learning_rate"], report)
    note = Path(config["folder"], f"trial-{uuid.uuid4().hex}")
    replace_file(note, f"{began} {time.time()} {os.getpid()}")


def our_trial(config: Any) -> None:
    from distributed import tune

    run_trial(config, tune.report)


def ray_trial(config: Any) -> None:
    from ray import tune

    run_trial(config, tune.report)
