"""Streams (iterable datasets): each rank keeps its share of every group of samples that makes one micro-batch.

Every rank reads the whole stream, so all know where it ends without asking each other, and the batches are those of one
process. With several DataLoader workers each of them reads the dataset once, as torch has it: a dataset that does not
split itself by `get_worker_info` would be read several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from distributed.data.shares import share

Collate = Callable[[list[Any]], Any]


class StreamBatch(NamedTuple):
    batch: Any
    size: int  # samples of this rank; 0: the batch is a stand-in
    total: int  # samples of the micro-batch over all ranks


class SharedStream(IterableDataset[StreamBatch]):
    """This rank's share of every `group` samples of a stream."""

    def __init__(self, dataset: Iterable[Any], collate: Collate, group: int, ranks: int, rank: int) -> None:
        self._dataset, self._collate, self._group, self._ranks, self._rank = dataset, collate, group, ranks, rank

    def __iter__(self) -> Iterator[StreamBatch]:
        samples = iter(self._dataset)
        while group := list(islice(samples, self._group)):
            start, stop = share(len(group), self._ranks, self._rank)
            yield StreamBatch(self._collate(group[start:stop] or group[:1]), stop - start, len(group))


class OwnStream(IterableDataset[StreamBatch]):
    """The stream of a dataset that splits itself over the ranks."""

    def __init__(self, dataset: Iterable[Any], collate: Collate, batch_size: int) -> None:
        self._dataset, self._collate, self._batch_size = dataset, collate, batch_size

    def __iter__(self) -> Iterator[StreamBatch]:
        samples = iter(self._dataset)
        while batch := list(islice(samples, self._batch_size)):
            yield StreamBatch(self._collate(batch), len(batch), len(batch))
