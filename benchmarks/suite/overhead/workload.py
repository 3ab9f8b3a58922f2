"""The workload of the overhead benchmark: one tiny model, one dataset, one optimizer, and a clock between steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BLOCK = 50  # steps; one of them is logged, so that all blocks have the same work
INPUTS, HIDDEN, CLASSES = 32, 64, 10
BATCH = 32  # samples a rank
WARM_UP, TAIL = 50, 2  # steps before and after those that are timed; some contenders read a batch ahead

Batch = tuple[torch.Tensor, torch.Tensor]
LOSS = nn.CrossEntropyLoss()
CPU = torch.device("cpu")


class Reading(NamedTuple):
    """What one rank's timed steps took, in µs a step."""

    cpu_us: float  # user and system time of the whole process, all threads
    wall_us: float
    python_us: float  # CPU time of its Python threads alone, without gloo's, which do the same for everybody
    best_python_us: float  # of the cheapest block of steps


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
class StepWorkload:
    """One epoch of one contender, made for each turn. See `distributed.bench.workloads.job.Job`."""

    rank: int
    ranks: int
    steps: int  # timed ones
    scratch: str  # a directory for whatever a contender writes
    engine: str = "pytorch-ddp"
    device: torch.device = CPU
    precision: str = "fp32"
    log_every: int = BLOCK
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clock", Clock(WARM_UP, WARM_UP + self.steps))

    def dataset(self) -> Rows:
        return Rows((WARM_UP + self.steps + TAIL) * BATCH * self.ranks)

    def loader(self) -> DataLoader[Batch]:
        """What a user has before anything is distributed."""
        return DataLoader(self.dataset(), batch_size=BATCH, shuffle=True, collate_fn=self.clock)

    def own_loader(self) -> DataLoader[Batch]:
        dataset = self.dataset()
        sampler: DistributedSampler[Batch] = DistributedSampler(dataset, self.ranks, self.rank)
        sampler.set_epoch(0)
        return DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=self.clock)

    def make_model(self) -> nn.Module:
        return make_model()

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(parameters)

    def loss(self, model: nn.Module, row: Sequence[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = LOSS(model(row[0]), row[1])
        return loss

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def look(self, step: int) -> None:
        """The clock is in the data loader here, as the batches are looked at in all blocks of 50."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
