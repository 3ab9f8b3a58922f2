"""Streams that shuffle are the same on every rank and after a resume, whatever else draws; else they are refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan
from distributed.data.checks.stream_digest import sample_digest
from distributed.data.loading.loader import EvalLoader
from distributed.data.loading.stream_loader import StreamLoader
from distributed.data.source import read_source
from distributed.data.virtual_ranks import seed_generators

LENGTH = 37


class Shuffled(IterableDataset):
    """Shuffles with one of the generators that a process has, drawing at the beginning and on the way."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self):
        order = self.permutation()
        while order:
            yield order.pop(self.number() % len(order))

    def permutation(self) -> list[int]:
        order = list(range(LENGTH))
        if self.by == "random":
            random.shuffle(order)
        elif self.by == "numpy":
            np.random.shuffle(order)
        elif self.by == "torch":
            order = torch.randperm(LENGTH).tolist()
        elif self.by == "worker's seed":
            worker = get_worker_info()
            assert worker is not None
            np.random.default_rng(worker.seed).shuffle(order)
        elif self.by == "its own":
            np.random.default_rng().shuffle(order)
        return order

    def number(self) -> int:
        drawn = {"random": lambda: random.randrange(99), "numpy": lambda: int(np.random.randint(99))}
        return drawn.get(self.by, lambda: int(torch.randint(99, ())))()


def loader(stream: Any, batch: BatchPlan, rank: int, split: str = "share", **options: Any) -> StreamLoader:
    source = read_source(DataLoader(stream, batch_size=batch.per_device, **options), "train_loader")
    return StreamLoader(source, batch, rank, seed=3, split=split, agree=lambda n, m: (n, m))


def used(steps: Any, noise: int = 0) -> list[int]:
    """What the steps are trained on, by a model that draws between them."""
    taken = []
    for step in steps:
        taken += [int(i) for micro in step.microbatches if micro.size for i in micro.batch]
        seed_generators(len(taken) + noise)
    return taken


@pytest.mark.parametrize(
    ("by", "workers"),
    [("random", 0), ("numpy", 0), ("torch", 0), ("random", 1), ("numpy", 1), ("torch", 1), ("worker's seed", 1)],
)
def test_ranks_read_one_shuffled_stream(by: str, workers: int) -> None:
    batch = BatchPlan(3, 2)
    by_rank = []
    for rank in range(2):
        seed_generators(100 + rank)
        mine = loader(Shuffled(by), batch, rank, num_workers=workers)
        by_rank.append([used(mine.epoch(epoch), rank) for epoch in range(2)])
    for epoch in range(2):
        assert sorted(by_rank[0][epoch] + by_rank[1][epoch]) == list(range(LENGTH))
    assert by_rank[0][0] != by_rank[0][1], "another order in each epoch"


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_resumes_in_mid_epoch_at_any_world_size(workers: int) -> None:
    for ranks, per_device in ((2, 3), (1, 6), (3, 2)):  # with as many ranks as before, fewer and more
        whole = [used(loader(Shuffled("random"), BatchPlan(3, 2), rank).epoch(1)) for rank in range(2)]
        first = loader(Shuffled("random"), BatchPlan(3, 2), 0)
        for _ in itertools.islice(first.epoch(1), 2):
            pass
        rest = []
        for rank in range(ranks):
            seed_generators(rank)
            again = loader(Shuffled("random"), BatchPlan(per_device, ranks), rank, num_workers=workers)
            again.expect(first.read_digest)
            rest += used(again.epoch(1, 2), rank)
        assert sorted(rest) == sorted(whole[0][6:] + whole[1][6:])


def test_stream_that_differs_when_read_again_is_refused() -> None:
    first = loader(Shuffled("its own"), BatchPlan(3), 0)
    next(first.epoch(1))
    again = loader(Shuffled("its own"), BatchPlan(3), 0)
    again.expect(first.read_digest)
    with pytest.raises(DataError, match="other samples than before in the first 1 steps of epoch 2"):
        next(again.epoch(1, 1))


def test_reading_a_stream_leaves_the_ranks_generators_unchanged() -> None:
    """So what a model draws does not hang on the stream, nor, after a resume, on what was passed over."""

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    seed_generators(5)
    expected = [drawn() for _ in range(4)]
    for first_step in (0, 2):
        seed_generators(5)
        steps = loader(Shuffled("random"), BatchPlan(3), 0).epoch(0, first_step)
        assert [drawn() for _ in itertools.islice(steps, 4)] == expected


def test_skipped_samples_are_not_collated() -> None:
    def noisy(samples: list[int]) -> float:
        return random.random()

    def batches(first_step: int) -> list[float]:
        seed_generators(5)
        steps = loader(Shuffled("numpy"), BatchPlan(1), 0, collate_fn=noisy).epoch(0, first_step)
        return [step.microbatches[0].batch for step in itertools.islice(steps, 3)]

    assert batches(0) == batches(5)


def test_stream_split_by_dataset_shuffles_per_rank() -> None:
    mine, theirs, again = (
        used(loader(Shuffled("torch"), BatchPlan(3, 2), rank, split="dataset").epoch(0)) for rank in (0, 1, 0)
    )
    assert mine == again != theirs


def test_evaluation_ranks_read_one_shuffled_stream() -> None:
    source = read_source(DataLoader(Shuffled("random"), batch_size=3), "val_loader")
    seen, digests = [], set()
    for rank in range(2):
        seed_generators(rank)
        mine = EvalLoader(source, 3, rank, 2)
        seen += [int(i) for batch, _ in mine for i in batch]
        digests.add(mine.read_digest)
    assert sorted(seen) == list(range(LENGTH))
    assert len(digests) == 1


def test_stream_digests_differ_for_different_streams() -> None:
    def digest(stream: Any) -> int:
        mine = loader(stream, BatchPlan(3, 2), 0)
        next(mine.epoch(0))
        return mine.read_digest

    assert digest(Shuffled("random")) == digest(Shuffled("random")) != digest(Shuffled("numpy"))
    assert digest(Shuffled("its own")) != digest(Shuffled("its own"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(300), torch.ones(300)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (torch.zeros(3, 4).t(), torch.ones(3, 4).t()),
        (torch.zeros(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj()),
        (np.zeros(3), np.ones(3)),
        (np.array(["a"]), np.array(["b"])),
        ({"x": [1, "a"]}, {"x": [1, "b"]}),
        (np.float32(1), np.float32(2)),
        (b"a", b"b"),
        (torch.zeros(2), torch.zeros(3)),
    ],
)
def test_sample_digest_depends_on_nested_values(one: Any, other: Any) -> None:
    assert sample_digest((one, 0)) == sample_digest((one, 0)) != sample_digest((other, 0))


def test_sample_digest_does_not_depend_on_addresses() -> None:
    assert sample_digest((object(), torch.eye(2).to_sparse())) == sample_digest((object(), torch.eye(2).to_sparse()))
