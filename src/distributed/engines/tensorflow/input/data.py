"""Data for replicas: arrays or a tf.data.Dataset, cut so that every sample is used once an epoch over all of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from distributed.core.batch_plan import BatchPlan
from distributed.core.errors import DataError
from distributed.data.order import shuffled_order
from distributed.data.shares import EpochSplit, share
from distributed.engines.tensorflow.input.sources import Arrays, KerasSource, map_tree, rows


class ReplicaPart(NamedTuple):
    """What one replica of this process takes of a micro-batch."""

    replica: int  # its number among all
    batch: Any  # (inputs,), (inputs, targets) or (inputs, targets, sample weights)
    weight: float  # its part of the step's samples
    size: int  # samples; 0: the batch is a stand-in that keeps the replicas in step and must leave no trace


class Micro(NamedTuple):
    parts: list[ReplicaPart]
    has_stand_in: bool  # on any replica, also of another process


class KerasStep(NamedTuple):
    micros: list[Micro]
    samples: int  # over all replicas


class KerasLoader(Protocol):
    @property
    def steps_per_epoch(self) -> int | None: ...

    @property
    def samples_per_epoch(self) -> int | None: ...

    @property
    def shuffle(self) -> bool | None: ...  # None: a dataset orders itself

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[KerasStep]: ...

    def sample_indices(self, epoch: int, step: int) -> list[int]: ...


class ArrayLoader:
    """Arrays in an order of seed and epoch; can begin at any step without reading what came before."""

    def __init__(self, arrays: Arrays, batch: BatchPlan, replicas: range, *, seed: int) -> None:
        self._arrays, self._batch, self._replicas, self._seed = arrays, batch, replicas, seed

    @property
    def samples_per_epoch(self) -> int:
        return self._arrays.samples

    @property
    def shuffle(self) -> bool:
        return self._arrays.shuffle

    @property
    def steps_per_epoch(self) -> int:
        return self._batch.steps(self._arrays.samples)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[KerasStep]:
        order = self._order(epoch)
        for step in range(first_step, self.steps_per_epoch):
            cuts = [self._cut(replica).micro_cuts(step) for replica in self._replicas]
            micros = [self._micro(order, step, number, list(of)) for number, of in enumerate(zip(*cuts, strict=True))]
            yield KerasStep(micros, self._cut(0).samples_in(step))

    def sample_indices(self, epoch: int, step: int) -> list[int]:
        """Of the samples that this process used in a step."""
        order = self._order(epoch)
        cuts = [cut for replica in self._replicas for cut in self._cut(replica).micro_cuts(step)]
        return [int(index) for cut in cuts for index in order[cut.start : cut.stop]]

    def _micro(self, order: Any, step: int, number: int, cuts: Sequence[Any]) -> Micro:
        parts = []
        for replica, cut in zip(self._replicas, cuts, strict=True):
            positions = order[cut.start : cut.stop] if cut.size else order[cut.first : cut.first + 1]
            parts.append(ReplicaPart(replica, self._arrays.take(positions), cut.weight / self._batch.ranks, cut.size))
        last = self._cut(self._batch.ranks - 1).micro_cuts(step)[number]  # the last replica has the fewest
        return Micro(parts, last.size == 0)

    def _cut(self, replica: int) -> EpochSplit:
        return EpochSplit(self._arrays.samples, self._batch, replica)

    def _order(self, epoch: int) -> Any:
        samples = self._arrays.samples
        return np.asarray(shuffled_order(samples, self._seed, epoch)) if self._arrays.shuffle else np.arange(samples)


class KerasStreamLoader:
    """A tf.data.Dataset, which every process reads whole, in its own order, and of which each replica keeps its share.

    A run that resumes in the middle of an epoch reads past what was used.
    """

    def __init__(self, open_epoch: Callable[[int], Any], batch: BatchPlan, replicas: range) -> None:
        self._open_epoch, self._batch, self._replicas = open_epoch, batch, replicas

    steps_per_epoch = samples_per_epoch = shuffle = None

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[KerasStep]:
        accumulation = self._batch.accumulation
        dataset = self._open_epoch(epoch).rebatch(self._batch.micro_batch)
        batches = iter(dataset.skip(first_step * accumulation).prefetch(2))
        steps = range(first_step, self._batch.limit) if self._batch.limit else itertools.count()
        for _ in steps:
            group = [(batch, rows(batch)) for batch in islice(batches, accumulation)]
            total = sum(size for _, size in group)
            if total == 0 or (self._batch.drop_last and total < self._batch.global_batch):
                return
            micros = [cut_batch(batch, size, total, self._batch.ranks, self._replicas) for batch, size in group]
            yield KerasStep(micros, total)

    def sample_indices(self, epoch: int, step: int) -> list[int]:
        return []


def cut_batch(batch: Any, size: int, total: int, ranks: int, replicas: range) -> Micro:
    """The parts of these replicas of a batch that all have read."""
    parts = []
    for replica in replicas:
        low, high = share(size, ranks, replica)
        start, stop = (low, high) if high > low else (0, 1)
        part = map_tree(itemgetter(slice(start, stop)), batch)
        parts.append(ReplicaPart(replica, part, (high - low) / total, high - low))
    return Micro(parts, size < ranks)


def train_loader(source: KerasSource, batch: BatchPlan, replicas: range, *, seed: int) -> KerasLoader:
    """What the loop trains on; a function is called here, in the process that uses its data."""
    made = source.made(seed)
    if isinstance(made, Arrays):
        if made.samples == 0:
            raise DataError("the training data is empty", do="check what you pass to fit")
        return ArrayLoader(made, batch, replicas, seed=seed)
    return KerasStreamLoader(made.epoch, batch, replicas)


@dataclass(frozen=True)
class KerasEvalLoader:
    """An evaluation's batches, cut as a training step's are: every sample once over all replicas."""

    source: KerasSource
    per_replica: int
    ranks: int
    replicas: range
    seed: int
    most: Callable[[int | None], int | None] = lambda samples: None  # samples over all replicas; None: all

    def __iter__(self) -> Iterator[Micro]:
        made, whole = self._made, self.per_replica * self.ranks
        most = self.most(made.samples if isinstance(made, Arrays) else None)
        if isinstance(made, Arrays):
            samples = made.samples if most is None else min(most, made.samples)
            for start in range(0, samples, whole):
                size = min(whole, samples - start)
                yield cut_batch(made.take(slice(start, start + size)), size, size, self.ranks, self.replicas)
            return
        if most is not None:
            made = made.rebatch(self.per_replica).take(most // self.per_replica)
        for batch in made.rebatch(whole).prefetch(2):
            size = rows(batch)
            yield cut_batch(batch, size, size, self.ranks, self.replicas)

    @functools.cached_property
    def _made(self) -> Any:
        """Arrays or a dataset. A function that makes them is called once, not for each evaluation."""
        made = self.source.made(self.seed)
        return made if isinstance(made, Arrays) else made.epoch(0)
