"""Every sample exactly once an epoch, for any length, batch and number of ranks; and weights that add up."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
)

from distributed.core.errors import DataError
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, Plan
from distributed.data.loading.loader import EvalLoader, TrainLoader
from distributed.data.loading.stream_loader import StreamLoader
from distributed.data.shares import EpochSplit
from distributed.data.source import Source, read_source


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def steps_of(source: Source, batch: BatchPlan, rank: int, epoch: int = 0, first_step: int = 0):
    return list(TrainLoader(source, batch, rank, seed=1).epoch(epoch, first_step))


def used(steps) -> list[int]:
    return [int(i) for step in steps for micro in step.microbatches if micro.size for i in micro.batch]


@pytest.mark.parametrize(
    ("length", "ranks", "per_device", "accumulation"),
    list(itertools.product([1, 2, 3, 7, 16, 37, 64], [1, 2, 3, 4, 5], [1, 3, 4], [1, 2, 3])),
)
def test_every_sample_is_used_once_for_any_split(length: int, ranks: int, per_device: int, accumulation: int) -> None:
    source = read_source(DataLoader(Numbers(length), shuffle=True), "train_loader")
    batch = BatchPlan(per_device, ranks, accumulation)
    by_rank = [steps_of(source, batch, rank) for rank in range(ranks)]
    assert Counter(i for steps in by_rank for i in used(steps)) == Counter(range(length))
    assert len({len(steps) for steps in by_rank}) == 1
    for step in zip(*by_rank, strict=True):  # what the ranks do in one step
        assert len({len(s.microbatches) for s in step}) == 1
        assert sum(m.weight for s in step for m in s.microbatches) == pytest.approx(ranks)
        assert sum(m.size for s in step for m in s.microbatches) == step[0].samples
        assert all(m.size <= per_device for s in step for m in s.microbatches)


def test_global_order_does_not_depend_on_world_size() -> None:
    source = read_source(DataLoader(Numbers(50), shuffle=True), "train_loader")
    orders = []
    for ranks, per_device in ((1, 12), (2, 6), (3, 4), (4, 3)):
        by_rank = [steps_of(source, BatchPlan(per_device, ranks), rank, epoch=3) for rank in range(ranks)]
        orders.append([[i for s in step for i in used([s])] for step in zip(*by_rank, strict=True)])
    assert orders[0] == orders[1] == orders[2] == orders[3]
    assert orders[0] != [list(range(start, min(start + 12, 50))) for start in range(0, 50, 12)], "not shuffled"


def test_order_differs_by_epoch_and_seed() -> None:
    source = Source(Numbers(40), shuffle=True)
    batch = BatchPlan(4)
    first = used(TrainLoader(source, batch, 0, seed=1).epoch(0))
    assert first != used(TrainLoader(source, batch, 0, seed=1).epoch(1))
    assert first != used(TrainLoader(source, batch, 0, seed=2).epoch(0))
    assert first == used(TrainLoader(source, batch, 0, seed=1).epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_can_start_at_any_step(workers: int) -> None:
    class Counting(Numbers):
        def __getitem__(self, index: int) -> int:
            return index

    source = Source(Counting(30), shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    loader = TrainLoader(source, BatchPlan(2, 2, 2), 1, seed=1)
    whole = [used([step]) for step in loader.epoch(2)]
    for first in (2, len(whole)):
        assert [used([step]) for step in loader.epoch(2, first)] == whole[first:]


def test_sample_indices_equal_the_samples_of_the_step() -> None:
    loader = TrainLoader(Source(Numbers(29), shuffle=True), BatchPlan(3, 2, 2), 1, seed=4)
    for number, step in enumerate(loader.epoch(1)):
        assert loader.sample_indices(1, number) == used([step])


def test_drop_last_drops_the_partial_global_batch() -> None:
    by_rank = [steps_of(Source(Numbers(30)), BatchPlan(4, 3, drop_last=True), rank) for rank in range(3)]
    assert sorted(i for steps in by_rank for i in used(steps)) == list(range(24))


def test_distributed_sampler_is_replaced_and_reported() -> None:
    sampler = DistributedSampler(Numbers(9), num_replicas=2, rank=0, shuffle=False)
    source = read_source(DataLoader(Numbers(9), batch_size=2, sampler=sampler), "train_loader")
    assert "DistributedSampler" in source.sampling
    by_rank = [used(steps_of(source, BatchPlan(2, 2), rank)) for rank in range(2)]
    assert sorted(by_rank[0] + by_rank[1]) == list(range(9))


def test_user_sampler_is_drawn_alike_on_every_rank() -> None:
    sampler = WeightedRandomSampler([1.0, 100.0, 1.0, 1.0], num_samples=40)
    source = read_source(DataLoader(Numbers(4), batch_size=2, sampler=sampler), "train_loader")
    torch.manual_seed(0)
    whole = used(steps_of(source, BatchPlan(8), 0))
    torch.manual_seed(123)  # the ranks' generators differ
    halves = [steps_of(source, BatchPlan(4, 2), rank) for rank in range(2)]
    together = [i for step in zip(*halves, strict=True) for s in step for i in used([s])]
    assert together == whole
    assert Counter(whole)[1] > 30


@pytest.mark.parametrize("length", [1, 5, 16, 23])
@pytest.mark.parametrize("workers", [0, 1])
def test_shared_stream_gives_every_sample_once(length: int, workers: int) -> None:
    source = read_source(DataLoader(Stream(length), batch_size=2, num_workers=workers), "train_loader")
    batch = BatchPlan(2, 3, 2)
    loaders = [StreamLoader(source, batch, r, seed=0, split="share", agree=lambda n, m: (n, m)) for r in range(3)]
    by_rank = [list(loader.epoch(0)) for loader in loaders]
    assert sorted(i for steps in by_rank for i in used(steps)) == list(range(length))
    assert len({len(steps) for steps in by_rank}) == 1
    for step in zip(*by_rank, strict=True):
        assert sum(m.weight for s in step for m in s.microbatches) == pytest.approx(3)


@pytest.mark.parametrize(("per_device", "ranks", "accumulation"), [(8, 4, 1), (3, 4, 1), (7, 4, 1), (3, 4, 2)])
def test_stream_resize_loses_no_sample(per_device: int, ranks: int, accumulation: int) -> None:
    first = BatchPlan(per_device, ranks, accumulation, of_stream=True)
    plan = Plan("run", first, mesh=MeshSpec(dp_replicate=ranks))
    source = read_source(DataLoader(Stream(1000), batch_size=per_device), "train_loader")
    for size in plan.legal_sizes:
        taken: list[int] = []
        cuts = first, first.for_ranks(size), first.for_ranks(size).for_ranks(ranks)
        for number, batch in enumerate(cuts):  # two steps under each
            for rank in range(batch.ranks):
                loader = StreamLoader(source, batch, rank, seed=0, split="share", agree=lambda n, m: (n, m))
                taken += used(itertools.islice(loader.epoch(0, 2 * number), 2))
        assert sorted(taken) == list(range(6 * first.global_batch)), f"as {size} ranks"


SMALL = list(itertools.product(range(1, 5), range(1, 5), range(1, 3)))


@pytest.mark.parametrize(("per_device", "ranks", "accumulation"), SMALL)
def test_resize_uses_every_sample_once(per_device: int, ranks: int, accumulation: int) -> None:
    batch = BatchPlan(per_device, ranks, accumulation)
    samples = 2 * batch.global_batch + batch.global_batch // 2
    for there in range(1, batch.global_batch + 3):  # also more ranks than a step has samples
        cut = batch.for_ranks(there)
        assert Counter(positions(samples, cut)) == Counter(range(samples))
        for step in range(cut.steps(samples)):
            shares = [EpochSplit(samples, cut, rank).cuts(step) for rank in range(there)]
            assert len({len(of_rank) for of_rank in shares}) == 1
            assert all(c.size <= per_device for of_rank in shares for c in of_rank)
            assert sum(c.weight for of_rank in shares for c in of_rank) == pytest.approx(there)


def positions(samples: int, batch: BatchPlan) -> list[int]:
    by_rank = [EpochSplit(samples, batch, rank) for rank in range(batch.ranks)]
    cuts = [c for of_rank in by_rank for step in range(of_rank.steps) for c in of_rank.cuts(step)]
    return [position for c in cuts for position in range(c.start, c.stop)]


@pytest.mark.parametrize("there", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("per_device", "accumulation"), [(1, 1), (1, 2), (2, 1)])
def test_resized_loader_reads_and_reports_every_sample_once(there: int, per_device: int, accumulation: int) -> None:
    """Where a share is empty, what stands in for it has no weight, and is not told as used."""
    batch = BatchPlan(per_device, 3, accumulation).for_ranks(there)
    seen, told = [], []
    for rank in range(there):
        loader = TrainLoader(Source(Numbers(29), shuffle=True), batch, rank, seed=4)
        for number, step in enumerate(loader.epoch(1)):
            seen += used([step])
            told += loader.indices
            assert loader.indices == used([step]) == loader.sample_indices(1, number)
    assert sorted(seen) == sorted(told) == list(range(29))


@pytest.mark.parametrize("length", [1, 5, 16, 23])
@pytest.mark.parametrize("stream", [False, True])
def test_evaluation_sees_every_sample_once(length: int, stream: bool) -> None:
    source = read_source(DataLoader(Stream(length) if stream else Numbers(length), batch_size=4), "val_loader")
    seen = [int(i) for rank in range(3) for batch, _ in EvalLoader(source, 4, rank, 3) for i in batch]
    assert sorted(seen) == list(range(length))


def test_loader_keeps_its_collate_fn() -> None:
    source = read_source(
        DataLoader(Numbers(4), batch_size=2, collate_fn=lambda items: {"items": items}), "train_loader"
    )
    (step, *_) = steps_of(source, BatchPlan(2), 0)
    assert step.microbatches[0].batch == {"items": [0, 1]}


class OwnBatches:
    def __iter__(self):
        return iter([[0, 1], [2]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(4), batch_sampler=OwnBatches()),
        DataLoader(Numbers(4), batch_size=None),
        DataLoader(Stream(4), batch_size=None),
        iter([1, 2]),
    ],
    ids=["batch_sampler", "unbatched", "unbatched_stream", "iterator"],
)
def test_batches_that_cannot_be_split_are_refused(loader: object) -> None:
    with pytest.raises(DataError, match="train_loader"):
        read_source(loader, "train_loader")
