"""How a DataLoader's own sampling is read: what it says is done, or it is refused by name; never passed over."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan
from distributed.data.loading.loader import EvalLoader, TrainLoader
from distributed.data.source import Source, read_source

LENGTH = 20


class Numbers(Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def read(**options: Any) -> Source:
    return read_source(DataLoader(Numbers(), **{"batch_size": 4} | options), "train_loader")


def orders(source: Source, epochs: int = 2) -> list[list[int]]:
    """What one rank trains on, epoch by epoch."""
    loader = TrainLoader(source, BatchPlan(4), 0, seed=1)
    return [[int(i) for step in loader.epoch(epoch) for i in step.microbatches[0].batch] for epoch in range(epochs)]


def batched(sampler: Any, drop_last: bool = False) -> Source:
    return read_source(DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, 4, drop_last)), "train_loader")


def test_sampler_inside_a_batch_sampler_is_used() -> None:
    shuffled = batched(RandomSampler(Numbers()), drop_last=True)
    assert (shuffled.batch_size, shuffled.drop_last, shuffled.shuffle) == (4, True, True)
    only_three = batched(WeightedRandomSampler([float(i == 3) for i in range(LENGTH)], 16))
    assert orders(only_three) == [[3] * 16] * 2
    assert orders(batched(SequentialSampler(Numbers()))) == [list(range(LENGTH))] * 2


class Backwards(Sampler):
    """Of several of torch's classes below, with an order of its own."""

    def __iter__(self):
        return iter(range(LENGTH - 1, -1, -1))


@pytest.mark.parametrize("base", [SequentialSampler, RandomSampler])
def test_subclass_of_a_torch_sampler_is_used(base: type) -> None:
    derived = type("Derived", (Backwards, base), {})
    assert orders(read(sampler=derived(Numbers()))) == [list(range(LENGTH - 1, -1, -1))] * 2
    assert orders(batched(derived(Numbers()))) == [list(range(LENGTH - 1, -1, -1))] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_generator_gives_torchs_order(persistent: bool) -> None:
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if persistent else {}

    def make() -> DataLoader:
        return DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(5), **workers)

    plain = make()
    expected = [[int(i) for batch in plain for i in batch] for _ in range(3)]
    assert orders(read_source(make(), "train_loader"), 3) == expected
    assert expected[0] != expected[1]


def test_sampler_generator_gives_torchs_order() -> None:
    generator = torch.Generator().manual_seed(5)
    source = read(sampler=SubsetRandomSampler(range(10, 16), generator))
    again = SubsetRandomSampler(range(10, 16), torch.Generator().manual_seed(5))
    expected = [list(again), list(again)]
    assert orders(source) == expected
    assert generator.get_state().equal(torch.Generator().manual_seed(5).get_state()), "it is drawn from in a copy"


def test_sampler_over_part_of_the_dataset_draws_only_it() -> None:
    assert orders(read(sampler=SequentialSampler(range(6)))) == [list(range(6))] * 2
    assert [sorted(order) for order in orders(read(sampler=RandomSampler(range(6))))] == [list(range(6))] * 2
    assert orders(read(sampler=[5, 3, 3])) == [[5, 3, 3]] * 2


def test_distributed_sampler_seed_gives_its_global_batches() -> None:
    ranks = [DistributedSampler(Numbers(), 2, rank, seed=7) for rank in range(2)]
    found = orders(read(sampler=DistributedSampler(Numbers(), 2, 0, seed=7)))
    for epoch, order in enumerate(found):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in ranks]
        for start in range(0, LENGTH, 4):
            theirs = [i for share in shares for i in share[start // 2 : start // 2 + 2]]
            assert sorted(order[start : start + 4]) == sorted(theirs)


def test_validation_uses_the_samples_of_its_sampler_once() -> None:
    source = read_source(DataLoader(Numbers(), 3, sampler=SubsetRandomSampler(range(7, 18))), "val_loader")
    for _ in range(2):
        seen = [int(i) for rank in range(2) for batch, _ in EvalLoader(source, 3, rank, 2) for i in batch]
        assert Counter(seen) == Counter(range(7, 18))


def test_loader_options_without_effect_are_reported() -> None:
    assert "in_order=False" in read(in_order=False).sampling
    told = read(sampler=RandomSampler(Numbers()), generator=torch.Generator()).sampling
    assert "generator is not used" in told


class OwnIteration(DataLoader):
    def __iter__(self):
        return iter([])


class OwnShares(DistributedSampler):
    pass


class NoLength(Sampler):
    def __init__(self) -> None:
        pass

    def __iter__(self):
        return iter([0])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: OwnIteration(Numbers(), 4), "OwnIteration"),
        (lambda: DataLoader(Numbers(), 4, sampler=OwnShares(Numbers(), 2, 0)), "OwnShares"),
        (lambda: DataLoader(Numbers(), 4, sampler=DistributedSampler(range(5), 2, 0)), "DistributedSampler of 5"),
        (lambda: DataLoader(Numbers(), 4, sampler=NoLength()), "NoLength"),
        (
            lambda: DataLoader(Numbers(), batch_sampler=type("Own", (BatchSampler,), {})(range(4), 2, False)),
            "batch sampler of its own",
        ),
    ],
)
def test_unsupported_sampling_is_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        read_source(make(), "train_loader")


def test_sampler_that_yields_no_indices_is_refused() -> None:
    source = read(sampler=BatchSampler(SequentialSampler(Numbers()), 2, False))
    with pytest.raises(DataError, match="BatchSampler draws something that is no index"):
        orders(source)
