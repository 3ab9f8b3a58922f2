"""The same work for every contender: one tiny model, one dataset, one optimizer, and the clock that is read between."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed.bench.turns import BLOCK, Reading

INPUTS, HIDDEN, CLASSES = 32, 64, 10
BATCH = 32  # samples a rank
WARM_UP, TAIL = 50, 2  # steps before and after those that are timed; some contenders read a batch ahead

Batch = tuple[torch.Tensor, torch.Tensor]


class Clock:
    """A collate function that looks at the clocks on every 50th batch: between two looks lie 50 steps.

    It is the one piece of a user's code that every trainer calls once a step, so nobody is measured from inside.
    """

    def __init__(self, first: int, last: int) -> None:
        self._looks, self._batches = range(first, last + 1, BLOCK), 0
        self._cpu_s: list[float] = []
        self._wall_s: list[float] = []
        self._python_s: list[float] = []

    def __call__(self, batch: Any) -> Any:
        if self._batches in self._looks:
            self._cpu_s.append(time.process_time())
            self._wall_s.append(time.perf_counter())
            self._python_s.append(python_threads_s())
        self._batches += 1
        return batch

    @property
    def reading(self) -> Reading:
        steps = (len(self._looks) - 1) * BLOCK
        cpu_us, wall_us, python_us = (
            (looks[-1] - looks[0]) / steps * 1e6 for looks in (self._cpu_s, self._wall_s, self._python_s)
        )
        best_s = min(after - before for before, after in pairwise(self._python_s))
        return Reading(cpu_us, wall_us, python_us, best_s / BLOCK * 1e6)


def python_threads_s() -> float:
    """CPU seconds of the Python threads that live now: the training, progress bars, writers of logs."""
    # A thread of C that once called Python stays in that list when it has ended, and its clock must not be asked for.
    ours = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
    return sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in ours if t.ident is not None)


class Rows(Dataset[Batch]):
    """Labelled rows that are read a batch at a time, so that reading them is a small part of a step."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(length, INPUTS, generator=generator)
        self._labels = torch.randint(CLASSES, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Batch:
        return self._inputs[index], self._labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._inputs[indices], self._labels[indices]


@dataclass(frozen=True)
class Work:
    """One epoch of one contender; made anew for each turn."""

    rank: int
    ranks: int
    steps: int  # timed ones
    scratch: str  # a directory for whatever a contender writes
    engine: str = "pytorch-ddp"
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clock", Clock(WARM_UP, WARM_UP + self.steps))

    def dataset(self) -> Rows:
        return Rows((WARM_UP + self.steps + TAIL) * BATCH * self.ranks)

    def loader(self) -> DataLoader[Batch]:
        """What a user has before anything is distributed."""
        return DataLoader(self.dataset(), batch_size=BATCH, shuffle=True, collate_fn=self.clock)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
