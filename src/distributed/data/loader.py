"""Loaders: this rank's shares of every step, and of an evaluation, as batches with their weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan
from distributed.data.drawn import drawn_order
from distributed.data.leaves import Leaf, LeafIndices, LeafReader, as_read
from distributed.data.order import derive_seed, shuffled_order
from distributed.data.shares import EpochCut, share, stream_weights
from distributed.data.source import Source
from distributed.data.stream import OwnStream, SharedStream, StreamBatch


class Microbatch(NamedTuple):
    batch: Any
    weight: float  # its part of the step's mean loss, times the number of ranks (but not for a leaf)
    size: int  # samples of this rank; 0: a stand-in that keeps the ranks in step and must leave no trace
    leaf: Leaf | None = None  # of a virtual rank; an empty one has no batch, nothing stands in for it


class Step(NamedTuple):
    microbatches: list[Microbatch]
    samples: int  # over all ranks


class _Indices:
    """The sampler of our DataLoaders: what the current pass reads, and what of it the loop has not seen yet."""

    def __init__(self) -> None:
        self._lists: Iterator[list[int]] = iter(())
        self._key: Callable[[int, list[int]], Any] = lambda number, indices: indices
        self.sent: deque[list[int]] = deque()  # workers read ahead of the loop

    def begin(self, lists: Iterator[list[int]], key: Callable[[int, list[int]], Any] | None = None) -> None:
        self._lists, self.sent = lists, deque()
        self._key = key or (lambda number, indices: indices)

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self._lists):
            self.sent.append(indices)
            yield self._key(number, indices)


def epoch_order(source: Source, seed: int, epoch: int) -> list[int] | range:
    if source.sampler is not None:
        return drawn_order(source.sampler, seed, epoch)
    samples = source.samples
    assert samples is not None
    return shuffled_order(samples, seed, epoch) if source.shuffle else range(samples)


class TrainLoader:
    """Every sample once an epoch, over all ranks; can begin at any step without reading what came before."""

    def __init__(self, source: Source, batch: BatchPlan, rank: int, *, seed: int, pin_memory: bool = False) -> None:
        self._source, self._batch, self._rank, self._seed = source, batch, rank, seed
        self._sampler = _Indices()
        self._taken: list[list[int]] = []
        options = source.loader_options(pin_memory=pin_memory) | {"generator": torch.Generator()}
        if source.num_workers:  # each batch is read under its own seed, whichever worker reads it, also after a resume
            reader = LeafReader(source.dataset, source.collate_fn)
            self._loader = DataLoader(reader, batch_size=None, sampler=self._sampler, collate_fn=as_read, **options)
        else:
            self._loader = DataLoader(
                source.dataset, batch_sampler=self._sampler, collate_fn=source.collate_fn, **options
            )

    @property
    def samples_per_epoch(self) -> int | None:
        return self._source.samples

    @property
    def steps_per_epoch(self) -> int | None:
        samples = self._source.samples
        return None if samples is None else self._batch.steps(samples)

    @property
    def indices(self) -> list[int]:
        """Of the samples in the step that came last; a stand-in's is not among them."""
        return [index for taken in self._taken for index in taken]

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        order = epoch_order(self._source, self._seed, epoch)
        cut = EpochCut(len(order), self._batch, self._rank)
        first_read = first_step * self._batch.accumulation
        prefix = (self._seed, "batch", epoch, self._rank)

        def seeded(number: int, indices: list[int]) -> LeafIndices:
            return LeafIndices(derive_seed(*prefix, first_read + number), indices)

        self._sampler.begin(_index_lists(order, cut, first_step), seeded if self._source.num_workers else None)
        batches, sent = iter(self._loader), self._sampler.sent
        samples, full_steps = self._batch.global_batch, max(first_step, cut.full_steps)
        shape = [(c.weight, c.size) for c in cut.micro_cuts(0)] if cut.full_steps else []
        if len(shape) == 1:  # the usual case, without a list comprehension a step
            weight, size = shape[0]
            for batch in islice(batches, full_steps - first_step):
                taken = sent.popleft()
                self._taken = [taken] if size else []
                yield Step([Microbatch(batch, weight, size)], samples)
        else:
            for _ in range(first_step, full_steps):
                micros = [Microbatch(next(batches), weight, size) for weight, size in shape]
                self._taken = [
                    taken for taken, m in zip([sent.popleft() for _ in micros], micros, strict=True) if m.size
                ]
                yield Step(micros, samples)
        for step in range(full_steps, cut.steps):
            cuts = cut.micro_cuts(step)
            micros = [Microbatch(next(batches), c.weight, c.size) for c in cuts]
            self._taken = [taken for taken, c in zip([sent.popleft() for _ in cuts], cuts, strict=True) if c.size]
            yield Step(micros, cut.samples_in(step))

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]:
        """The dataset indices that this rank used in a step, or another one in another cut, computed anew."""
        order = epoch_order(self._source, self._seed, epoch)
        cuts = EpochCut(len(order), batch or self._batch, self._rank if rank is None else rank).cuts(step)
        return [index for cut in cuts for index in order[cut.start : cut.stop]]


def _index_lists(order: list[int] | range, cut: EpochCut, first_step: int) -> Iterator[list[int]]:
    size = cut.batch.global_batch
    spans = [(micro.start, micro.stop, micro.first) for micro in cut.micro_cuts(0)] if cut.full_steps else []
    for base in range(first_step * size, cut.full_steps * size, size):
        for start, stop, first in spans:
            yield list(order[base + start : base + stop]) or [order[base + first]]
    for step in range(max(first_step, cut.full_steps), cut.steps):
        for micro in cut.micro_cuts(step):
            yield list(order[micro.start : micro.stop]) or [order[micro.first]]


class StreamLoader:
    """The same for a stream: every rank reads all of it and keeps its share, or the dataset splits itself."""

    def __init__(
        self,
        source: Source,
        batch: BatchPlan,
        rank: int,
        *,
        seed: int,
        split: str,
        agree: Callable[[int, int], tuple[int, int]],
        pin_memory: bool = False,
    ) -> None:
        self._source, self._batch, self._rank, self._seed = source, batch, rank, seed
        self._splits_itself, self._agree = split == "dataset", agree
        self._options = source.loader_options(pin_memory=pin_memory)

    steps_per_epoch = samples_per_epoch = None
    indices: list[int] = []  # noqa: RUF012 - a stream's samples have no numbers

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        batches = self._read(epoch)
        stand_in: StreamBatch | None = None
        step = 0
        while True:
            micros = [micro for _, micro in zip(range(self._batch.accumulation), batches, strict=False)]
            stand_in = micros[0] if micros else stand_in
            total, most = sum(m.total for m in micros), len(micros)
            if self._splits_itself:
                total, most = self._agree(sum(m.size for m in micros), len(micros))
            if total == 0:
                return
            if self._batch.drop_last and total < self._batch.global_batch:
                continue
            if stand_in is None:
                raise DataError(
                    "this rank's part of the stream is empty, while others have samples",
                    why="iterable_split='dataset' leaves the split to the dataset",
                    do="give every rank at least one sample, or set iterable_split='share'",
                )
            micros += [stand_in._replace(size=0)] * (most - len(micros))
            if step >= first_step:
                weights = stream_weights([m.size for m in micros], total, self._batch.ranks)
                rows = zip(micros, weights, strict=True)
                yield Step([Microbatch(m.batch, weight, m.size) for m, weight in rows], total)
            step += 1

    def _read(self, epoch: int) -> Iterator[StreamBatch]:
        set_epoch = getattr(self._source.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if self._splits_itself:
            stream: Any = OwnStream(self._source.dataset, self._source.collate_fn, self._batch.per_device)
        else:
            sizes = (self._batch.micro_batch, self._batch.ranks, self._rank)
            stream = SharedStream(self._source.dataset, self._source.collate_fn, *sizes)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "workers", epoch, self._rank))
        return iter(DataLoader(stream, batch_size=None, generator=generator, **self._options))

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]:
        return []


class EvalLoader:
    """This rank's share of an evaluation, every sample once; the ranks need not keep in step."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        rank: int,
        ranks: int,
        *,
        split: str = "share",
        pin_memory: bool = False,
        in_step: bool = False,
    ) -> None:
        """`in_step`: as many batches on every rank; those that have fewer end with stand-ins of size 0."""
        self._source, self._batch_size, self._rank, self._ranks = source, batch_size, rank, ranks
        self._in_step = in_step
        self._splits_itself, self._pin_memory = split == "dataset", pin_memory

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Batches with their number of samples."""
        options = self._source.loader_options(pin_memory=self._pin_memory) | {"generator": torch.Generator()}
        options.pop("persistent_workers", None)  # the workers live for one pass
        if self._source.is_stream:
            yield from self._stream(options)
            return
        order = epoch_order(self._source, 0, 0)
        length = len(order) // self._batch_size * self._batch_size if self._source.drop_last else len(order)
        start, stop = share(length, self._ranks, self._rank)
        lists = [list(order[i : min(i + self._batch_size, stop)]) for i in range(start, stop, self._batch_size)]
        sizes = [len(indices) for indices in lists]
        if self._in_step and length:
            most = -(-share(length, self._ranks, 0)[1] // self._batch_size)  # the first rank has the most
            lists, sizes = lists + [[order[0]]] * (most - len(lists)), sizes + [0] * (most - len(lists))
        loader = DataLoader(self._source.dataset, batch_sampler=lists, collate_fn=self._source.collate_fn, **options)
        yield from zip(loader, sizes, strict=True)

    def _stream(self, options: dict[str, Any]) -> Iterator[tuple[Any, int]]:
        dataset, collate = self._source.dataset, self._source.collate_fn
        if self._splits_itself:
            stream: Any = OwnStream(dataset, collate, self._batch_size)
        else:
            stream = SharedStream(dataset, collate, self._batch_size * self._ranks, self._ranks, self._rank)
        for batch in DataLoader(stream, batch_size=None, **options):
            if batch.size or self._in_step:
                yield batch.batch, batch.size
