"""Virtual ranks: every sample once, in the same share and with the same randomness, whichever rank holds it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from distributed.core.plan import BatchPlan
from distributed.data.loading.virtual_rank_loader import VirtualRankLoader
from distributed.data.source import Source

LEAVES = 8


class Draws(Dataset):
    """(index, a random number of each generator)"""

    offset = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, tuple[float, float, float]]:
        return index + self.offset, (random.random(), np.random.random(), torch.rand(()).item())


def plan(ranks: int, least_leaf: int = 1, drop_last: bool = False) -> BatchPlan:
    return BatchPlan(16 // ranks, ranks, leaves=LEAVES, least_leaf=least_leaf, drop_last=drop_last)


def read(length: int, batch: BatchPlan, first_step: int = 0, **options: Any) -> list[list[Any]]:
    """The leaves of each step, over all ranks: (number, weight, samples with what was drawn for them)."""
    source = Source(Draws(length), shuffle=True, collate_fn=list, **options)
    loaders = [VirtualRankLoader(source, batch, rank, seed=1) for rank in range(batch.ranks)]
    steps = zip(*(loader.epoch(2, first_step) for loader in loaders), strict=True)
    found = []
    for number, step in enumerate(steps, first_step):
        micros = [micro for s in step for micro in s.microbatches]
        assert [micro.size for micro in micros] == [len(micro.batch or []) for micro in micros]
        assert sum(micro.size for micro in micros) == step[0].samples
        assert sum(micro.weight for micro in micros) == pytest.approx(1)
        for loader, s in zip(loaders, step, strict=True):
            used = [index for micro in s.microbatches for index, _ in micro.batch or []]
            assert loader.indices == loader.sample_indices(2, number) == used
        found.append([(micro.virtual_share.number, micro.weight, micro.batch) for micro in micros])
    return found


@pytest.mark.parametrize(("length", "least_leaf"), list(itertools.product([1, 3, 7, 16, 17, 50, 64], [1, 2])))
def test_virtual_ranks_read_the_same_samples_at_any_world_size(length: int, least_leaf: int) -> None:
    one = read(length, plan(1, least_leaf))
    assert Counter(i for step in one for _, _, batch in step for i, _ in batch or []) == Counter(range(length))
    assert [[number for number, _, _ in step] for step in one] == [list(range(LEAVES))] * len(one)
    for ranks in (2, 4, 8):
        assert read(length, plan(ranks, least_leaf)) == one
    draws = [draw for step in one for _, _, batch in step for _, draw in batch or []]
    for by_one in zip(*draws, strict=True):
        assert len(set(by_one)) == length, "every sample has a random number of its own"


def test_short_step_keeps_two_samples_per_virtual_rank() -> None:
    sizes = [[len(batch or []) for _, _, batch in step] for step in read(16 + 5, plan(1, least_leaf=2))]
    assert sizes == [[2] * 8, [3, 2, 0, 0, 0, 0, 0, 0]]


def test_workers_and_mid_epoch_start_change_no_random_draw() -> None:
    whole = read(50, plan(2))
    assert read(50, plan(2), num_workers=2) == whole
    assert read(50, plan(2), first_step=2, num_workers=2) == whole[2:]
    assert read(50, plan(2, drop_last=True)) == whole[:3]


def set_offset(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.dataset.length == 20, "the dataset's attributes are there to be read"
    info.dataset.offset = 100  # ... and to be set


def test_worker_init_fn_reaches_the_users_dataset() -> None:
    source = Source(Draws(20), collate_fn=list, num_workers=1, worker_init_fn=set_offset)
    (step, *_) = VirtualRankLoader(source, plan(1), 0, seed=1).epoch(0)
    assert [index for micro in step.microbatches for index, _ in micro.batch] == list(range(100, 116))
