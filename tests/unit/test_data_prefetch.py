"""One step ahead: the steps are the same, and what is told of a step is of the one that is being trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from distributed.core.plan import BatchPlan
from distributed.data.loading.loader import TrainLoader
from distributed.data.loading.prefetch import Prefetch
from distributed.data.loading.rows import RowLoader, Rows
from distributed.data.loading.stream_loader import StreamLoader
from distributed.data.source import Source, read_source

CPU = torch.device("cpu")
BATCHES = [BatchPlan(4), BatchPlan(3, 2, 2), BatchPlan(2, 3).for_ranks(7)]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(29))


def seen(step: Any) -> list[tuple[list[int], float, int]]:
    return [(micro.batch.tolist(), micro.weight, micro.size) for micro in step.microbatches]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_steps_and_indices_equal_the_loaders(batch: BatchPlan, workers: int) -> None:
    source = Source(Numbers(), shuffle=True, num_workers=workers)
    plain, ahead = (TrainLoader(source, batch, batch.ranks - 1, seed=1, seeds_batches=True) for _ in range(2))
    prefetch = Prefetch(ahead, CPU)
    assert prefetch.indices == []
    assert prefetch.steps_per_epoch == plain.steps_per_epoch
    for epoch, first in ((0, 0), (1, 2)):
        steps = zip(prefetch.epoch(epoch, first), plain.epoch(epoch, first), strict=True)
        for number, (step, expected) in enumerate(steps, first):
            assert seen(step) == seen(expected)
            assert step.samples == expected.samples
            assert prefetch.indices == plain.indices == prefetch.sample_indices(epoch, number)


def test_prefetch_is_exactly_one_step_ahead() -> None:
    source = Source(TensorDataset(torch.arange(12)), shuffle=True)
    rows = Rows.of(source, CPU)
    assert rows is not None
    inner = RowLoader(source, rows, BatchPlan(3), 0, seed=1)
    outer = Prefetch(inner, CPU)
    positions = []
    for step in outer.epoch(0):
        assert outer.indices == step.microbatches[0].batch[0].tolist()
        assert inner.step_samples is not None
        positions.append(inner.step_samples.step)
    assert positions == [1, 2, 3, 3]


def test_unfinished_prefetch_epoch_can_start_again() -> None:
    prefetch = Prefetch(TrainLoader(Source(Numbers()), BatchPlan(4), 0, seed=1), CPU)
    first = next(iter(prefetch.epoch(0)))
    assert next(seen(step) for step in prefetch.epoch(0)) == seen(first)
    assert list(prefetch.epoch(0, 8)) == []


def test_prefetch_reads_a_stream_ahead() -> None:
    source = read_source(DataLoader(Stream(), batch_size=4), "train_loader")
    loader = StreamLoader(source, BatchPlan(4), 0, seed=0, split="share", agree=lambda n, m: (n, m))
    prefetch = Prefetch(loader, CPU)
    assert [i for step in prefetch.epoch(0) for m in step.microbatches for i in m.batch.tolist()] == list(range(29))
    assert prefetch.indices == []


class Broken(Numbers):
    """Its twelfth sample cannot be read."""

    def __getitem__(self, index: int) -> int:
        if index == 11:
            raise OSError("no such file")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_prefetch_error_is_raised_at_its_step(workers: int) -> None:
    prefetch = Prefetch(TrainLoader(Source(Broken(), num_workers=workers), BatchPlan(4), 0, seed=1), CPU)
    steps = prefetch.epoch(0)
    assert [next(steps).microbatches[0].batch.tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError, match="no such file"):
        next(steps)


class Counted(IterableDataset[int]):
    def __init__(self) -> None:
        self.read = 0

    def __iter__(self):
        for number in range(40):
            self.read += 1
            yield number


@pytest.mark.parametrize(("max_steps", "read"), [(3, 12), (None, 16)])
def test_prefetch_reads_nothing_after_max_steps(max_steps: int | None, read: int) -> None:
    data = Counted()
    source = read_source(DataLoader(data, batch_size=4), "train_loader")
    loader = StreamLoader(source, BatchPlan(4), 0, seed=0, split="share", agree=lambda n, m: (n, m))
    steps = Prefetch(loader, CPU, max_steps=max_steps).epoch(0)
    for _ in range(3):
        next(steps)
    assert data.read == read
    assert next(steps).microbatches[0].batch.tolist() == [12, 13, 14, 15], "should somebody ask all the same"


@pytest.mark.parametrize(("epoch", "first"), [(0, 0), (1, 0), (1, 3)])
def test_prefetch_reads_nothing_after_max_steps_in_later_epoch(epoch: int, first: int) -> None:
    inner = TrainLoader(Source(Numbers()), BatchPlan(4), 0, seed=1)
    outer = Prefetch(inner, CPU, max_steps=8 + 5)
    taken = []
    for step, _ in enumerate(outer.epoch(epoch, first), first):
        assert inner.step_samples is not None
        taken.append(inner.step_samples.step - step)
    expected = [1] * 7 + [0]
    if epoch == 1:
        expected[4] = 0  # the thirteenth step of the run
    assert taken == expected[first:]
