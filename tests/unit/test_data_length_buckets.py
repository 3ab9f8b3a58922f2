"""Batches of samples of similar length: every sample once, a function of seed, epoch and global batch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan
from distributed.data.length_buckets import LengthBucketSampler, SampleLength, as_lengths, bucketed_order, padding
from distributed.data.loading.lengths import MeasuringRank, keep_lengths, kept_lengths, measure_lengths
from distributed.data.loading.loader import TrainLoader
from distributed.data.order import permutation
from distributed.data.source import Source, read_source


def lengths_of(samples: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return (np.random.RandomState(seed).lognormal(4, 0.8, samples) + 1).astype(np.int32)


@pytest.mark.parametrize(("samples", "batch"), [(0, 4), (3, 4), (4, 4), (37, 4), (1000, 8), (5003, 16)])
def test_every_sample_is_in_an_epoch_once(samples: int, batch: int) -> None:
    lengths = lengths_of(samples)
    for epoch in range(3):
        order = bucketed_order(lengths, batch, 7, epoch)
        assert sorted(order.tolist()) == list(range(samples))
        assert order.tolist() == bucketed_order(lengths, batch, 7, epoch).tolist()
    if samples > 2 * batch:
        assert bucketed_order(lengths, batch, 7, 1).tolist() != bucketed_order(lengths, batch, 7, 2).tolist()
        assert bucketed_order(lengths, batch, 7, 1).tolist() != bucketed_order(lengths, batch, 8, 1).tolist()


def test_padding_is_saved_and_the_batches_are_shuffled() -> None:
    lengths = lengths_of(20_000)
    order = bucketed_order(lengths, 32, 0, 1)
    assert padding(order, lengths, 32) < 0.08 < 0.7 < padding(permutation(20_000, 0, 1), lengths, 32)
    means = lengths[order[:19_968]].reshape(-1, 32).mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.15
    halves = lengths[order[:19_968]].reshape(-1, 2, 16).sum(axis=2)  # what two ranks take
    assert abs(float(np.mean(halves[:, 0] / halves[:, 1])) - 1) < 0.01


def test_last_batch_is_no_sample_of_its_length() -> None:
    """What drop_last drops is drawn at random in each epoch, and not the shortest or the longest."""
    lengths = np.arange(1, 1003, dtype=np.int32)
    dropped = [lengths[bucketed_order(lengths, 100, 0, epoch)[1000:]].tolist() for epoch in range(200)]
    assert 400 < np.mean(dropped) < 600


def test_first_epoch_begins_with_the_longest_sample() -> None:
    lengths = lengths_of(1000)
    assert lengths.max() in lengths[bucketed_order(lengths, 8, 3, 0)[:8]]


def test_ranks_take_their_shares_of_the_same_batches() -> None:
    lengths = lengths_of(101)
    data = [[0] * int(n) for n in lengths]
    source = Source(data, shuffle=True, length_of=SampleLength(), lengths=lengths, collate_fn=len)
    order = bucketed_order(lengths, 12, 5, 0).tolist()
    for ranks in (1, 2, 3):
        batch = BatchPlan(12 // ranks, ranks)
        loaders = [TrainLoader(source, batch, rank, seed=5) for rank in range(ranks)]
        for step, steps in enumerate(zip(*(loader.epoch(0) for loader in loaders), strict=True)):
            taken = [index for loader in loaders for index in loader.indices]
            assert taken == order[12 * step : 12 * step + 12]
            assert len(steps) == ranks


class Sentences:
    """Of one to seven words, under a name of their own."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": [0] * (index % 7 + 1), "label": index}


def alone(rank: int = 0, count: int = 1) -> MeasuringRank:
    return MeasuringRank(rank, count, lambda values: values)


def test_lengths_are_measured_in_parts_by_the_ranks() -> None:
    source = Source(Sentences(), shuffle=True, length_of=SampleLength("words"))
    whole = measure_lengths(source, alone(), lambda text: None)
    assert whole.tolist() == [index % 7 + 1 for index in range(50)]
    parts = [measure_lengths(source, alone(rank, 3), lambda text: None) for rank in range(3)]
    assert sum(parts).tolist() == whole.tolist()  # type: ignore[attr-defined]


def test_lengths_are_kept_for_the_same_data_and_rule(tmp_path: Any) -> None:
    keep_lengths(lengths_of(5), "a", tmp_path / "run" / "lengths.npz")
    kept = kept_lengths("a", tmp_path / "run" / "lengths.npz")
    assert kept is not None
    assert kept.tolist() == lengths_of(5).tolist()
    assert kept_lengths("b", tmp_path / "run" / "lengths.npz") is None


def test_sample_without_a_known_length_is_named() -> None:
    source = Source(Sentences(), shuffle=True, length_of=SampleLength())
    with pytest.raises(DataError, match="the length of sample 0 is not known") as refused:
        measure_lengths(source, alone(), lambda text: None)
    assert "bucket_by_length=input_ids" in refused.value.problems[0].do


def test_sampler_works_in_a_plain_loop_and_is_read_by_its_class() -> None:
    data = Sentences()
    sampler = LengthBucketSampler(data, 5, lambda sample: len(sample["words"]))
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(50))
    source = read_source(DataLoader(data, batch_size=5, sampler=sampler), "train_loader")  # type: ignore[arg-type]
    assert (source.shuffle, source.sampler, source.length_of) == (True, None, sampler.rule)
    given = LengthBucketSampler(data, 5, [3] * 25 + [4] * 25)
    source = read_source(DataLoader(data, batch_size=5, sampler=given), "train_loader")  # type: ignore[arg-type]
    assert source.lengths is given.lengths
    with pytest.raises(DataError, match="the lengths given for 50 samples"):
        LengthBucketSampler(data, 5, [3] * 49)
    with pytest.raises(DataError, match="float64"):
        as_lengths([0.5, 1.0], 2)  # type: ignore[list-item]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(Endless(), batch_size=2), "a stream"),
        (DataLoader(TensorDataset(torch.zeros(4)), batch_size=2), "read in the dataset's order"),
        (DataLoader(TensorDataset(torch.zeros(4)), batch_size=2, sampler=[3, 2, 1, 0]), "a sampler of its own"),
    ],
)
def test_order_that_cannot_be_bucketed_is_refused(loader: DataLoader[Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        read_source(loader, "train_loader").bucketed(True, "train_loader")
