"""Orders of a sampler with a generator of its own: alike on every rank, and the same after a resume, or it is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from distributed.data.drawn import DrawnOrders, OwnSampler

LENGTH = 12


class Kept:
    """Draws from a generator that it keeps from epoch to epoch."""

    def __init__(self, seed: int | None) -> None:
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self):
        return iter(self.rng.permutation(LENGTH).tolist())


class Restorable(Kept):
    def state_dict(self) -> dict[str, Any]:
        return self.rng.bit_generator.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state


class Interrupted(Restorable):
    """As torchdata's: a state is that of an iteration, and what is restored first ends that."""

    has_ended = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.has_ended = True

    def __iter__(self):
        if self.has_ended:
            self.has_ended = False
            return iter([])
        return super().__iter__()


def drawn(orders: DrawnOrders, epochs: range) -> list[list[int]]:
    return [orders.order(epoch).tolist() for epoch in epochs]


@pytest.mark.parametrize("stands_in", [2, 3], ids=["within an epoch", "between two"])
@pytest.mark.parametrize(
    ("make", "is_restored"),
    [
        (lambda: Kept(0), True),
        (lambda: Kept(None), False),
        (lambda: Restorable(None), True),
        (lambda: Interrupted(None), True),
        (lambda: WeightedRandomSampler([1.0] * LENGTH, LENGTH), True),
        (lambda: WeightedRandomSampler([1.0] * LENGTH, LENGTH, generator=torch.Generator().manual_seed(4)), True),
    ],
    ids=["seeded", "unseeded", "with state", "with state of an iteration", "torch's", "torch's with generator"],
)
def test_sampler_orders_continue_after_a_resume(make: Any, is_restored: bool, stands_in: int) -> None:
    whole = DrawnOrders(OwnSampler(make()), 1)
    before, state = drawn(whole, range(3)), whole.state(stands_in)
    later = drawn(whole, range(3, 5))
    assert len({tuple(order) for order in before + later}) == 5

    between = DrawnOrders(OwnSampler(make()), 1)  # a world that breaks before it draws anything
    between.load_state(state)
    resumed = DrawnOrders(OwnSampler(make()), 1)
    resumed.load_state(between.state(stands_in))
    assert drawn(resumed, range(stands_in, 3)) == before[stands_in:], "the epoch in progress goes on in its order"
    again = drawn(resumed, range(3, 5))
    assert (again == later, resumed.note == "") == (is_restored, is_restored)
    if not is_restored:
        assert "Kept does not draw again" in resumed.note
        assert [sorted(order) for order in again] == [list(range(LENGTH))] * 2


def test_another_rank_can_draw_the_order_after_a_fault() -> None:
    """Another rank draws after a fault: one that has only been sent the orders until then."""
    whole = drawn(DrawnOrders(OwnSampler(Kept(0)), 1), range(4))
    first, second = OwnSampler(Kept(0)), OwnSampler(Kept(0))
    world = DrawnOrders(first, 1)
    drawn(world, range(2))
    after = DrawnOrders(second, 1)
    after.load_state(world.state(1))
    assert drawn(after, range(1, 4)) == whole[1:]
    assert after.note == ""


def test_drawn_order_is_kept_by_the_next_world() -> None:
    """A world that breaks before its first step of an epoch has drawn the order, which the next one must have too."""
    sampler = OwnSampler(Kept(None))
    first = DrawnOrders(sampler, 1)
    before = drawn(first, range(2))
    second = DrawnOrders(sampler, 1)
    of_another_rank = {"drawn": 1, "digest": sampler.digest_before, "sampler": None}  # it had not got the second one
    second.load_state(of_another_rank)
    assert drawn(second, range(1, 2)) == before[1:]
    assert second.note == ""


def test_torch_sampler_order_depends_only_on_epoch_and_seed() -> None:
    sampler = OwnSampler(WeightedRandomSampler([1.0] * LENGTH, LENGTH))
    first = {(epoch, seed): sampler.draw(epoch, seed).tolist() for epoch in (3, 0, 1) for seed in (1, 2)}
    again = {key: sampler.draw(*key).tolist() for key in sorted(first)}
    assert again == first
    assert len({tuple(order) for order in first.values()}) == 6


def test_checkpoint_without_sampler_orders_can_be_resumed() -> None:
    whole = drawn(DrawnOrders(OwnSampler(Restorable(0)), 1), range(5))
    old = DrawnOrders(OwnSampler(Restorable(0)), 1)
    old.load_state({})
    assert drawn(old, range(2, 4)) == whole[2:4]
    resumed = DrawnOrders(OwnSampler(Restorable(0)), 1)
    resumed.load_state(old.state(4))
    assert (drawn(resumed, range(4, 5)), resumed.note) == (whole[4:], "")


def test_saved_order_uses_int32_where_it_fits() -> None:
    orders = DrawnOrders(OwnSampler(range(LENGTH)), 1)
    assert orders.order(0).dtype == torch.int64
    assert orders.state(0)["order"].dtype == torch.int32
    far = DrawnOrders(OwnSampler([2**40]), 1)
    assert far.order(0).tolist() == far.state(0)["order"].tolist() == [2**40]
