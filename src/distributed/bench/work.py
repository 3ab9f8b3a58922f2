"""The same work for every contender: one tiny model, one dataset, one optimizer, and the clock that is read between."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

INPUTS, HIDDEN, CLASSES = 32, 64, 10
BATCH = 32  # samples a rank
WARM_UP, TAIL = 50, 2  # steps before and after those that are timed; some contenders read a batch ahead

Batch = tuple[torch.Tensor, torch.Tensor]


class Reading(NamedTuple):
    """Seconds that the timed steps took."""

    cpu_s: float  # user and system time of the whole process, all threads
    wall_s: float


class Clock:
    """A collate function that looks at the clocks on two batches: between them lie the timed steps.

    It is the one piece of a user's code that every trainer calls once a step, so nobody is measured from inside.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last, self._batches = first, last, 0
        self._marks: list[Reading] = []

    def __call__(self, batch: Any) -> Any:
        if self._batches in (self._first, self._last):
            self._marks.append(Reading(time.process_time(), time.perf_counter()))
        self._batches += 1
        return batch

    @property
    def reading(self) -> Reading:
        begun, ended = self._marks
        return Reading(ended.cpu_s - begun.cpu_s, ended.wall_s - begun.wall_s)


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
