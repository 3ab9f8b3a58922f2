"""Loaders: this rank's shares of every step, and of an evaluation, as batches with their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan
from distributed.data.dali import DaliBatches
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


Order = list[int] | range | torch.Tensor  # of an epoch: the numbers of its samples


class Taken(NamedTuple):
    """The samples that a rank used in a step: kept as where to find them, because hardly anybody asks."""

    order: Order
    cut: EpochCut
    step: int

    @property
    def indices(self) -> list[int]:
        """A stand-in's is not among them."""
        return [index for c in self.cut.cuts(self.step) for index in numbers(self.order[c.start : c.stop])]


def numbers(part: Order) -> list[int]:
    return part.tolist() if isinstance(part, torch.Tensor) else list(part)


class Reads:
    """The sampler of our DataLoaders: what the current pass reads."""

    def __init__(self) -> None:
        self.keys: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.keys


def epoch_order(source: Source, seed: int, epoch: int) -> list[int] | range:
    if source.sampler is not None:
        return drawn_order(source.sampler, seed, epoch)
    samples = source.samples
    assert samples is not None
    return shuffled_order(samples, seed, epoch) if source.shuffle else range(samples)


class TrainLoader:
    """Every sample once an epoch, over all ranks; can begin at any step without reading what came before."""

    def __init__(
        self,
        source: Source,
        batch: BatchPlan,
        rank: int,
        *,
        seed: int,
        pin_memory: bool = False,
        seeds_batches: bool = False,
    ) -> None:
        """`seeds_batches`: what a batch draws hangs on its place in the epoch alone, and not on who reads it."""
        self._begin(source, batch, rank, seed)
        self._seeds_batches = seeds_batches or source.num_workers > 0  # whichever worker reads it, after a resume too
        options = source.loader_options(pin_memory=pin_memory) | {"generator": torch.Generator()}
        self._loader = DataLoader(**_reading(source, self._reads, self._seeds_batches), **options)

    def _begin(self, source: Source, batch: BatchPlan, rank: int, seed: int) -> None:
        self._source, self._batch, self._rank, self._seed = source, batch, rank, seed
        self._reads = Reads()
        self.taken: Taken | None = None  # in the step that came last

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
        return [] if self.taken is None else self.taken.indices

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        order = self._order(epoch)
        cut = EpochCut(len(order), self._batch, self._rank)
        batches = self._read(order, cut, epoch, first_step)
        samples, full_steps = self._batch.global_batch, max(first_step, cut.full_steps)
        shape = [(c.weight, c.size) for c in cut.micro_cuts(0)] if cut.full_steps else []
        if len(shape) == 1:  # the usual case, without a list comprehension a step
            weight, size = shape[0]
            for step, batch in zip(range(first_step, full_steps), batches, strict=False):
                self.taken = Taken(order, cut, step)
                yield Step([Microbatch(batch, weight, size)], samples)
        else:
            for step in range(first_step, full_steps):
                micros = [Microbatch(next(batches), weight, size) for weight, size in shape]
                self.taken = Taken(order, cut, step)
                yield Step(micros, samples)
        for step in range(full_steps, cut.steps):
            micros = [Microbatch(next(batches), c.weight, c.size) for c in cut.micro_cuts(step)]
            self.taken = Taken(order, cut, step)
            yield Step(micros, cut.samples_in(step))

    def endless(self, part: float) -> Iterator[Any]:
        """Batches of the first epoch, again and again, for whoever wants to know how quickly they come."""
        self._reads.keys = self.keys(part)
        return iter(self._loader)

    def keys(self, part: float) -> Iterator[Any]:
        """What a data loader reads for them, from some part of the epoch on."""
        order = self._order(0)
        cut = EpochCut(len(order), self._batch, self._rank)
        first = int(part * cut.steps)
        while cut.steps:
            yield from self._keys(order, cut, 0, first)
            first = 0

    def _order(self, epoch: int) -> Order:
        return epoch_order(self._source, self._seed, epoch)

    def _read(self, order: Order, cut: EpochCut, epoch: int, first_step: int) -> Iterator[Any]:
        """The batch of every micro-batch from a step on."""
        self._reads.keys = self._keys(order, cut, epoch, first_step)
        return iter(self._loader)

    def _keys(self, order: Order, cut: EpochCut, epoch: int, first_step: int) -> Iterator[Any]:
        lists = (numbers(order[start:stop]) for start, stop in cut.spans(first_step))
        if not self._seeds_batches:
            return lists
        prefix, first_read = (self._seed, "batch", epoch, self._rank), first_step * self._batch.accumulation
        return (LeafIndices(derive_seed(*prefix, n), indices) for n, indices in enumerate(lists, first_read))

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]:
        """The dataset indices that this rank used in a step, or another one in another cut, computed anew."""
        order = self._order(epoch)
        cut = EpochCut(len(order), batch or self._batch, self._rank if rank is None else rank)
        return Taken(order, cut, step).indices


def _reading(source: Source, keys: Iterable[Any], seeds_batches: bool) -> dict[str, Any]:
    """What a DataLoader reads by keys: lists of indices or, if each batch has a seed of its own, LeafIndices."""
    if not seeds_batches:
        return {"dataset": source.dataset, "batch_sampler": keys, "collate_fn": source.collate_fn}
    reader = LeafReader(source.dataset, source.collate_fn, apart=not source.num_workers)
    return {"dataset": reader, "batch_size": None, "sampler": keys, "collate_fn": as_read}


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
    taken: Taken | None = None
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
        if isinstance(self._source.dataset, DaliBatches):
            return self._source.dataset.batches()
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
        batch_seed: int | None = None,
    ) -> None:
        """`in_step`: as many batches on every rank; those that have fewer end with stand-ins of size 0. With a
        `batch_seed`, what a batch draws does not hang on who reads it."""
        self._source, self._batch_size, self._rank, self._ranks = source, batch_size, rank, ranks
        self._in_step, self._batch_seed = in_step, batch_seed
        self._splits_itself, self._pin_memory = split == "dataset", pin_memory

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Batches with their number of samples."""
        if self._source.is_stream:
            yield from self._stream()
            return
        order = epoch_order(self._source, 0, 0)
        length = len(order) // self._batch_size * self._batch_size if self._source.drop_last else len(order)
        start, stop = share(length, self._ranks, self._rank)
        spans = [(i, min(i + self._batch_size, stop)) for i in range(start, stop, self._batch_size)]
        sizes = [stop - start for start, stop in spans]
        if self._in_step and length:
            most = -(-share(length, self._ranks, 0)[1] // self._batch_size)  # the first rank has the most
            spans, sizes = spans + [(0, 1)] * (most - len(spans)), sizes + [0] * (most - len(spans))
        yield from zip(self._read(order, spans), sizes, strict=True)

    def _read(self, order: Order, spans: list[tuple[int, int]]) -> Iterable[Any]:
        lists, seed = [numbers(order[start:stop]) for start, stop in spans], self._batch_seed
        keys: list[Any] = lists
        if seed is not None:
            prefix = (seed, "evaluation", self._rank)
            keys = [LeafIndices(derive_seed(*prefix, n), indices) for n, indices in enumerate(lists)]
        return DataLoader(**_reading(self._source, keys, seed is not None), **self._options())

    def _options(self) -> dict[str, Any]:
        options = self._source.loader_options(pin_memory=self._pin_memory) | {"generator": torch.Generator()}
        options.pop("persistent_workers", None)  # the workers live for one pass
        return options

    def _stream(self) -> Iterator[tuple[Any, int]]:
        for batch in self._stream_batches():
            if batch.size or self._in_step:
                yield batch.batch, batch.size

    def _stream_batches(self) -> Iterable[StreamBatch]:
        dataset, collate = self._source.dataset, self._source.collate_fn
        if isinstance(dataset, DaliBatches):
            return dataset.batches()
        if self._splits_itself:
            stream: Any = OwnStream(dataset, collate, self._batch_size)
        else:
            stream = SharedStream(dataset, collate, self._batch_size * self._ranks, self._ranks, self._rank)
        return DataLoader(stream, batch_size=None, **self._options())
