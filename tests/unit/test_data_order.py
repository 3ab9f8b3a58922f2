"""The order of an epoch: another one for each epoch and seed, and the same one in every version."""

from __future__ import annotations

from distributed.data.order import shuffled_order
from distributed.data.virtual_ranks import VirtualShare


def test_shuffled_order_is_stable_across_versions() -> None:
    """A run that resumes with a later version goes on with the samples that are left."""
    assert shuffled_order(8, seed=0, epoch=0) == [2, 4, 1, 0, 6, 5, 7, 3]
    orders = {tuple(shuffled_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9, "neither two epochs nor two seeds have one order"


def test_virtual_ranks_and_steps_have_distinct_seeds() -> None:
    leaves = [VirtualShare.of(0, epoch, step, number) for epoch in (0, 1) for step in (0, 1) for number in (0, 1)]
    streams = [seed for leaf in leaves for seed in (leaf.loading_seed, leaf.training_seed)]
    assert len(set(streams)) == len(streams)
    assert len({leaf.after_seed for leaf in leaves}) == 4, "what is drawn after a step is alike for its leaves"
