"""The training that the recovery benchmark kills: one model, data and optimizer for both sides, and a log of steps.

Nothing here but torch is imported, so that no side pays for what only the other needs.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

BATCH = 32  # samples a rank
SAVE_EVERY = 20  # steps
PACE_S = 0.02  # a batch takes so long to read, so that runs which only wait for their turn leave the cores alone
INPUTS, HIDDEN, CLASSES = 64, 128, 10
SAMPLES = 128_000


class PacedRows(Dataset[Any]):
    """Labelled rows that are read a batch at a time, and not at once."""

    def __init__(self, pace_s: float = PACE_S) -> None:
        self._pace_s = pace_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((INPUTS,), index / SAMPLES), index % CLASSES

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(self._pace_s)
        return [self[index] for index in indices]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def make_optimizer(parameters: Any, folder: str) -> torch.optim.Optimizer:
    """AdamW, which counts its steps in the state that is saved: what it logs is the step that was really taken.

    Not by a hook: of an optimizer with hooks, ranks on a GPU do not take the state in memory for that of a step.
    """
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    take_step = optimizer.step
    files: dict[int, int] = {}

    def step(*args: Any, **options: Any) -> Any:
        result = take_step(*args, **options)
        rank = dist.get_rank()
        if rank not in files:
            files[rank] = os.open(steps_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        number = int(next(iter(optimizer.state.values()))["step"])
        now = time.monotonic_ns()  # one clock for all processes of a machine
        os.write(files[rank], f"{now} {number} {os.getpid()}\n".encode())
        return result

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def steps_path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"steps-{rank}")
