"""Loaders: this rank's shares of every step, and of an evaluation, as batches with their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan
from distributed.data.order import derive_seed, drawn_order, shuffled_order
from distributed.data.shares import EpochCut, share, stream_weights
from distributed.data.source import Source
from distributed.data.stream import OwnStream, SharedStream, StreamBatch


class Microbatch(NamedTuple):
    batch: Any
    weight: float  # its part of the step's mean loss, times the number of ranks
    size: int  # samples of this rank; 0: a stand-in that keeps the ranks in step and must leave no trace


class Step(NamedTuple):
    microbatches: list[Microbatch]
    samples: int  # over all ranks


class _Indices:
    """The batch sampler of our DataLoaders: whatever lists of indices the current pass has."""

    def __init__(self) -> None:
        self.lists: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.lists


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
        self._indices = _Indices()
        options = source.loader_options(pin_memory=pin_memory)
        self._loader = DataLoader(
            source.dataset,
            batch_sampler=self._indices,
            collate_fn=source.collate_fn,
            generator=torch.Generator(),
            **options,
        )

    @property
    def steps_per_epoch(self) -> int | None:
        samples = self._source.samples
        return None if samples is None else self._batch.steps(samples)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        order = epoch_order(self._source, self._seed, epoch)
        cut = EpochCut(len(order), self._batch, self._rank)
        self._indices.lists = _index_lists(order, cut, first_step)
        assert self._loader.generator is not None
        self._loader.generator.manual_seed(derive_seed(self._seed, "workers", epoch, self._rank))
        batches = iter(self._loader)
        full = [(c.weight, c.size) for c in cut.micro_cuts(0)] if cut.full_steps else []
        for step in range(first_step, cut.steps):
            shape = full if step < cut.full_steps else [(c.weight, c.size) for c in cut.micro_cuts(step)]
            yield Step([Microbatch(next(batches), weight, size) for weight, size in shape], cut.samples_in(step))

    def sample_indices(self, epoch: int, step: int) -> list[int]:
        """The dataset indices that this rank used in a step, computed anew: nothing was recorded."""
        order = epoch_order(self._source, self._seed, epoch)
        cuts = EpochCut(len(order), self._batch, self._rank).micro_cuts(step)
        return [index for cut in cuts for index in order[cut.start : cut.stop]]


def _index_lists(order: list[int] | range, cut: EpochCut, first_step: int) -> Iterator[list[int]]:
    for step in range(first_step, cut.steps):
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

    steps_per_epoch = None

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

    def sample_indices(self, epoch: int, step: int) -> list[int]:
        return []


class EvalLoader:
    """This rank's share of an evaluation, every sample once; the ranks need not keep in step."""

    def __init__(
        self, source: Source, batch_size: int, rank: int, ranks: int, *, split: str = "share", pin_memory: bool = False
    ) -> None:
        self._source, self._batch_size, self._rank, self._ranks = source, batch_size, rank, ranks
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
        loader = DataLoader(self._source.dataset, batch_sampler=lists, collate_fn=self._source.collate_fn, **options)
        yield from zip(loader, map(len, lists), strict=True)

    def _stream(self, options: dict[str, Any]) -> Iterator[tuple[Any, int]]:
        dataset, collate = self._source.dataset, self._source.collate_fn
        if self._splits_itself:
            stream: Any = OwnStream(dataset, collate, self._batch_size)
        else:
            stream = SharedStream(dataset, collate, self._batch_size * self._ranks, self._ranks, self._rank)
        for batch in DataLoader(stream, batch_size=None, **options):
            if batch.size:
                yield batch.batch, batch.size
