"""What the ranks took together is what was due, for any cut; a share that is repeated or left out is found."""

from __future__ import annotations

import itertools

import pytest

from distributed.core.plan import BatchPlan
from distributed.data.checks.tally import Tally, agree, order_digest, tally
from distributed.data.shares import EpochSplit


def total(cuts: list[EpochSplit], first: int, stop: int) -> Tally:
    return Tally(*map(sum, zip(*(tally(cut, first, stop) for cut in cuts), strict=True)))


@pytest.mark.parametrize("batch", [BatchPlan(3, 2, 2), BatchPlan(4), BatchPlan(1, 5), BatchPlan(4, 2, leaves=4)])
def test_tally_agrees_for_ranks_with_the_same_split(batch: BatchPlan) -> None:
    for samples in (1, 13, 64, 101):
        cuts = [EpochSplit(samples, batch, rank) for rank in range(batch.ranks)]
        for first, stop in itertools.combinations_with_replacement(range(cuts[0].steps + 1), 2):
            found = total(cuts, first, stop)
            assert agree(found)
            assert found.taken == sum(cuts[0].samples_in(step) for step in range(first, stop))


@pytest.mark.parametrize(
    "cuts",
    [
        [EpochSplit(64, BatchPlan(4, 2), 0), EpochSplit(64, BatchPlan(4, 2), 0)],
        [EpochSplit(64, BatchPlan(4, 2), 0), EpochSplit(64, BatchPlan(2, 2, 2), 1)],
        [EpochSplit(64, BatchPlan(4, 2), 0), EpochSplit(60, BatchPlan(4, 2), 1)],
    ],
    ids=["two take the same", "other micro-batches", "fewer samples"],
)
def test_tally_finds_ranks_with_another_split(cuts: list[EpochSplit]) -> None:
    assert not agree(total(cuts, 0, 8))


def test_order_digest_depends_on_order_and_length() -> None:
    long = list(range(100_000))
    assert order_digest(long) == order_digest(range(100_000))
    assert order_digest(long[::-1]) != order_digest(long) != order_digest(long[:-1])
