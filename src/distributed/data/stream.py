"""Streams (iterable datasets): each rank keeps its share of every group of samples that makes one micro-batch.

Every rank reads the whole stream, so all know where it ends without a collective, and the batches are those of one
process. With several DataLoader workers each of them reads the dataset once, as torch has it: a dataset that does not
split itself by `get_worker_info` would be read several times.

While it is read, the stream has Python's, numpy's and torch's generators to itself, seeded for the epoch: it draws the
same on every rank, and again when a run resumes in the middle of an epoch, regardless of what the model draws.
Collating is not part of that: a rank collates its own shard, under its own generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from distributed.core.errors import DataError
from distributed.data.checks.stream_digest import StreamDigest
from distributed.data.generators import Generators
from distributed.data.loading.forks import ForkedLoader
from distributed.data.order import derive_seed
from distributed.data.shares import share
from distributed.data.virtual_ranks import as_read, seed_generators

Collate = Callable[[list[Any]], Any]


class StreamBatch(NamedTuple):
    batch: Any
    size: int  # samples of this rank; 0: the batch is a stand-in
    total: int  # samples of the micro-batch over all ranks
    digest: int = 0  # of the samples that were read for it


class StreamSamples(NamedTuple):
    """What a rank read of a stream until a step."""

    digest: int
    indices: list[int] = []  # noqa: RUF012 - a stream's samples have no numbers


class StreamSeeds(NamedTuple):
    """Of one pass over a stream. Ranks that share one have all but `collating` in common."""

    reading: int
    workers: int  # torch's base seed, which a dataset finds in get_worker_info()
    collating: int  # in a worker; else the rank's own generators are used

    @staticmethod
    def of(seed: int, epoch: int | str, rank: int, *, splits_itself: bool) -> StreamSeeds:
        whose = (epoch, rank) if splits_itself else (epoch,)
        return StreamSeeds(
            derive_seed(seed, "stream", *whose),
            derive_seed(seed, "workers", *whose),
            derive_seed(seed, "collate", epoch, rank),
        )


class _Groups:
    """The samples of a stream, some at a time, with the digest of what was read."""

    def __init__(self, dataset: Iterable[Any], seeds: StreamSeeds) -> None:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if info is not None:
            seed_generators(derive_seed(seeds.collating, worker))
        self._generators, self._digest = Generators(derive_seed(seeds.reading, worker)), StreamDigest(worker)
        with self._generators:
            self._samples = iter(dataset)

    def take(self, size: int) -> tuple[list[Any], int]:
        with self._generators:
            group = list(islice(self._samples, size))
        return group, self._digest.add(group)


class SharedStream(IterableDataset[StreamBatch]):
    """This rank's share of every `group` samples of a stream."""

    def __init__(
        self, dataset: Iterable[Any], collate: Collate, seeds: StreamSeeds, *, group: int, ranks: int, rank: int
    ) -> None:
        self._dataset, self._collate, self._seeds = dataset, collate, seeds
        self._group, self._ranks, self._rank = group, ranks, rank

    def __iter__(self) -> Iterator[StreamBatch]:
        groups = _Groups(self._dataset, self._seeds)
        while True:
            group, digest = groups.take(self._group)
            if not group:
                return
            start, stop = share(len(group), self._ranks, self._rank)
            yield StreamBatch(self._collate(group[start:stop] or group[:1]), stop - start, len(group), digest)


class OwnStream(IterableDataset[StreamBatch]):
    """The stream of a dataset that splits itself over the ranks."""

    def __init__(self, dataset: Iterable[Any], collate: Collate, seeds: StreamSeeds, batch_size: int) -> None:
        self._dataset, self._collate, self._seeds, self._batch_size = dataset, collate, seeds, batch_size

    def __iter__(self) -> Iterator[StreamBatch]:
        groups = _Groups(self._dataset, self._seeds)
        while True:
            batch, digest = groups.take(self._batch_size)
            if not batch:
                return
            yield StreamBatch(self._collate(batch), len(batch), len(batch), digest)


def open_stream(stream: IterableDataset[StreamBatch], seeds: StreamSeeds, options: dict[str, Any]) -> ForkedLoader:
    """One pass over it, in worker processes if the options say so."""
    generator = torch.Generator().manual_seed(seeds.workers)
    return ForkedLoader(stream, batch_size=None, collate_fn=as_read, generator=generator, **options)


def reads_otherwise(epoch: int, steps: int) -> DataError:
    """A stream that was to be read again from an epoch's beginning did not give what it gave before."""
    return DataError(
        f"the stream reads other samples than before in the first {steps} steps of epoch {epoch + 1}",
        why="a run that resumes in the middle of an epoch reads its stream again and skips its trained steps, so "
        "samples would be repeated and others left out",
        do="let it draw from Python's, numpy's or torch's global generators, which are seeded for each epoch, or seed "
        "its own in set_epoch(epoch); with sample_check=False the run resumes nevertheless",
    )
