"""Loaders: this rank's shares of every step, and of an evaluation, as batches with their weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from distributed.core.batch_plan import BatchPlan
from distributed.core.errors import DataError
from distributed.data.checks.stream_digest import total_digest
from distributed.data.checks.tally import Tally, order_digest, tally
from distributed.data.drawn import DrawnOrders, Share, Tree, make_here
from distributed.data.length_buckets import bucketed_order, digest_of
from distributed.data.loading.dali import DaliBatches
from distributed.data.loading.forks import ForkedLoader
from distributed.data.order import derive_seed, shuffled_order
from distributed.data.shares import EpochSplit, share
from distributed.data.source import Source
from distributed.data.stream import (
    OwnStream,
    SharedStream,
    StreamBatch,
    StreamSeeds,
    open_stream,
)
from distributed.data.virtual_ranks import ShareIndices, ShareReader, VirtualShare, as_read


class Microbatch(NamedTuple):
    batch: Any
    weight: float  # its part of the step's mean loss, times the number of ranks (but not for a virtual rank)
    size: int  # samples of this rank; 0: a stand-in that keeps the ranks in step and must leave no trace
    virtual_share: VirtualShare | None = None  # of a virtual rank; an empty one has no batch, nothing stands in for it


class Step(NamedTuple):
    microbatches: list[Microbatch]
    samples: int  # over all ranks


Order = list[int] | range | torch.Tensor  # of an epoch: the numbers of its samples


class StepSamples(NamedTuple):
    """The samples that a rank used in a step; their indices are computed only when they are needed."""

    order: Order
    cut: EpochSplit
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
        self._keys: Iterator[Any] = iter(())

    def begin(self, keys: Iterator[Any]) -> None:
        """A pass over these."""
        self._keys = keys

    def __iter__(self) -> Iterator[Any]:
        return self._keys


def sequence(source: Source, seed: int, epoch: int) -> list[int] | range:
    """The order of a source without a sampler of the user's."""
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
        share: Share = make_here,
    ) -> None:
        """`seeds_batches`: what a batch draws depends on its place in the epoch, not on the process that reads it.
        `share`: how the ranks get the order that one of them draws."""
        self._begin(source, batch, rank, seed, share)
        self._seeds_batches = seeds_batches or source.num_workers > 0  # the same for any worker, after a resume too
        options = source.loader_options(pin_memory=pin_memory) | {"generator": torch.Generator()}
        self._loader = ForkedLoader(**_reading(source, self._reads, self._seeds_batches), **options)

    def _begin(self, source: Source, batch: BatchPlan, rank: int, seed: int, share: Share) -> None:
        self._source, self._batch, self._rank, self._seed = source, batch, rank, seed
        own = source.own_sampler
        self._drawn = None if own is None else DrawnOrders(own, seed, share)
        self._known: tuple[int, Order] | None = None  # an epoch and its order
        self._reads = Reads()
        self._had_lengths: tuple[int, str] | None = None  # of the epoch in which a run resumes, and their digest
        self.step_samples: StepSamples | None = None  # in the step that came last

    @property
    def samples_per_epoch(self) -> int | None:
        return self._source.samples

    @property
    def steps_per_epoch(self) -> int | None:
        return self.steps_in(0)

    def steps_in(self, epoch: int) -> int | None:
        samples = self._source.samples
        return None if samples is None else self._batch.at(epoch).steps(samples)

    def _split(self, epoch: int, length: int) -> EpochSplit:
        """This rank's shares of an epoch of that many samples."""
        return EpochSplit(length, self._batch.at(epoch), self._rank)

    read_digest = 0  # a stream has one

    @property
    def indices(self) -> list[int]:
        """Of the samples in the step that came last; a stand-in's is not among them."""
        return [] if self.step_samples is None else self.step_samples.indices

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        self._check_lengths(epoch, first_step)
        order = self._order(epoch)
        cut = self._split(epoch, len(order))
        batches = self._read(order, cut, epoch, first_step)
        samples, full_steps = cut.batch.global_batch, max(first_step, cut.full_steps)
        shape = [(c.weight, c.size) for c in cut.micro_cuts(0)] if cut.full_steps else []
        if len(shape) == 1:  # the usual case, without a list comprehension a step
            weight, size = shape[0]
            for step, batch in zip(range(first_step, full_steps), batches, strict=False):
                self.step_samples = StepSamples(order, cut, step)
                yield Step([Microbatch(batch, weight, size)], samples)
        else:
            for step in range(first_step, full_steps):
                micros = [Microbatch(next(batches), weight, size) for weight, size in shape]
                self.step_samples = StepSamples(order, cut, step)
                yield Step(micros, samples)
        for step in range(full_steps, cut.steps):
            micros = [Microbatch(next(batches), c.weight, c.size) for c in cut.micro_cuts(step)]
            self.step_samples = StepSamples(order, cut, step)
            yield Step(micros, cut.samples_in(step))

    def endless(self, part: float) -> Iterator[Any]:
        """Batches of the first epoch, repeated without end, to measure how fast they are read."""
        self._reads.begin(self.keys(part))
        return iter(self._loader)

    def keys(self, part: float) -> Iterator[Any]:
        """What a data loader reads for them, from some part of the epoch on."""
        order = self._order(0)
        cut = self._split(0, len(order))
        first = int(part * cut.steps)
        while cut.steps:
            yield from self._keys(order, cut, 0, first)
            first = 0

    def order_digest(self, epoch: int) -> str:
        """Of the epoch's order, as this rank has it. Every rank calls it for the same epochs, before they begin."""
        return order_digest(self._order(epoch))

    def tally(self, epoch: int, first_step: int, stop_step: int) -> Tally:
        """What this rank has taken in these steps of an epoch that it has begun."""
        return tally(self._split(epoch, len(self._order(epoch))), first_step, stop_step)

    def expect(self, digest: int) -> None:
        """Of a stream alone."""

    @property
    def note(self) -> str:
        """A warning about the epoch's order; mostly none."""
        return "" if self._drawn is None else self._drawn.note

    def state(self, epoch: int) -> Tree:
        """What a run must save in this epoch to resume with the same samples."""
        if self._source.lengths is not None:
            return {"lengths": digest_of(self._source.lengths), "epoch": epoch}
        return {} if self._drawn is None else self._drawn.state(epoch)

    def load_state(self, state: Tree) -> None:
        self._known = None
        if self._source.lengths is not None and "lengths" in state:
            self._had_lengths = state["epoch"], state["lengths"]
        if self._drawn is not None:
            self._drawn.load_state(state)

    def _check_lengths(self, epoch: int, first_step: int) -> None:
        """Of a run that resumes in the middle of an epoch: the rest of its order must be the same."""
        lengths = self._source.lengths
        if lengths is None or not first_step or self._had_lengths is None or self._had_lengths[0] != epoch:
            return
        if self._had_lengths[1] != digest_of(lengths):
            raise DataError(
                "the samples have other lengths than when this epoch was begun",
                why="bucket_by_length orders them by these, so some would be repeated and others left out",
                do="measure the same lengths as before: they must not depend on what is drawn",
            )

    def _order(self, epoch: int) -> Order:
        if self._known is None or self._known[0] != epoch:
            self._known = None  # two orders are not held at once
            self._known = epoch, self._make_order(epoch)
        return self._known[1]

    def _make_order(self, epoch: int) -> Order:
        if self._drawn is not None:
            return self._drawn.order(epoch)
        if (lengths := self._source.lengths) is not None:
            return torch.from_numpy(bucketed_order(lengths, self._batch.global_batch, self._seed, epoch))
        return sequence(self._source, self._seed, epoch)

    def _read(self, order: Order, cut: EpochSplit, epoch: int, first_step: int) -> Iterator[Any]:
        """The batch of every micro-batch from a step on."""
        self._reads.begin(self._keys(order, cut, epoch, first_step))
        return iter(self._loader)

    def _keys(self, order: Order, cut: EpochSplit, epoch: int, first_step: int) -> Iterator[Any]:
        lists = (numbers(order[start:stop]) for start, stop in cut.spans(first_step))
        if not self._seeds_batches:
            return lists
        prefix, first_read = (self._seed, "batch", epoch, self._rank), first_step * cut.batch.accumulation
        return (ShareIndices(derive_seed(*prefix, n), indices) for n, indices in enumerate(lists, first_read))

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]:
        """The dataset indices that this rank, or `rank` with `batch`, used in a step; computed, not recorded."""
        order = self._order(epoch)
        cut = EpochSplit(len(order), (batch or self._batch).at(epoch), self._rank if rank is None else rank)
        return StepSamples(order, cut, step).indices


def _reading(source: Source, keys: Iterable[Any], seeds_batches: bool) -> dict[str, Any]:
    """What a DataLoader reads by keys: lists of indices or, if each batch has a seed of its own, ShareIndices."""
    if not seeds_batches:
        return {"dataset": source.dataset, "batch_sampler": keys, "collate_fn": source.collate_fn}
    reader = ShareReader(source.dataset, source.collate_fn, restores_generators=not source.num_workers)
    return {"dataset": reader, "batch_size": None, "sampler": keys, "collate_fn": as_read}


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
        lockstep: bool = False,
        batch_seed: int | None = None,
        share: Share = make_here,
        most: int | None = None,
    ) -> None:
        """`lockstep`: as many batches on every rank; those that have fewer end with stand-ins of size 0. With a
        `batch_seed`, what a batch draws does not hang on who reads it. A sampler is drawn from once, for all
        evaluations, and `share` is how the ranks get what one of them drew. `most`: samples over all ranks, the first
        ones, in whole batches of a stream; of one that splits itself, of each rank."""
        own = source.own_sampler
        self._drawn = None if own is None else DrawnOrders(own, 0, share)
        self.read_digest = 0  # of what was read of a stream in the evaluation that came last
        self.position = 0  # of the batch that came last: the number of its first sample
        self._source, self._batch_size, self._rank, self._ranks = source, batch_size, rank, ranks
        self._lockstep, self._batch_seed, self._most = lockstep, batch_seed, most
        self._splits_itself, self._pin_memory = split == "dataset", pin_memory

    @property
    def is_stream(self) -> bool:
        return self._source.is_stream

    @property
    def samples(self) -> int | None:
        """How many samples an evaluation reads, over all ranks; None: a stream."""
        return None if self._source.is_stream else len(self._order())

    @property
    def is_numbered(self) -> bool:
        """Whether positions count the samples of all ranks; else each rank's its own."""
        return not (self.is_stream and (self._splits_itself or self.is_read_once))

    @property
    def is_read_once(self) -> bool:
        """Whether it must be read to its end before it can be read again."""
        return isinstance(self._source.dataset, DaliBatches)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Batches with their number of samples."""
        if self._source.is_stream:
            yield from self._stream()
            return
        order = self._order()
        length = len(order) // self._batch_size * self._batch_size if self._source.drop_last else len(order)
        if self._most is not None:
            length = min(length, self._most)
        start, stop = share(length, self._ranks, self._rank)
        spans = [(i, min(i + self._batch_size, stop)) for i in range(start, stop, self._batch_size)]
        sizes = [stop - start for start, stop in spans]
        if self._lockstep and length:
            most = -(-share(length, self._ranks, 0)[1] // self._batch_size)  # the first rank has the most
            spans, sizes = spans + [(0, 1)] * (most - len(spans)), sizes + [0] * (most - len(spans))
        for batch, size, (first, _) in zip(self._read(order, spans), sizes, spans, strict=True):
            self.position = first
            yield batch, size

    def _order(self) -> Order:
        return sequence(self._source, 0, 0) if self._drawn is None else self._drawn.order(0)

    def _read(self, order: Order, spans: list[tuple[int, int]]) -> Iterable[Any]:
        lists, seed = [numbers(order[start:stop]) for start, stop in spans], self._batch_seed
        keys: list[Any] = lists
        if seed is not None:
            prefix = (seed, "evaluation", self._rank)
            keys = [ShareIndices(derive_seed(*prefix, n), indices) for n, indices in enumerate(lists)]
        reading = _reading(self._source, keys, seed is not None)
        return ForkedLoader(**reading, generator=torch.Generator(), **self._options())

    def _options(self) -> dict[str, Any]:
        options = self._source.loader_options(pin_memory=self._pin_memory)
        options.pop("persistent_workers", None)  # the workers live for one pass
        return options

    def _stream(self) -> Iterator[tuple[Any, int]]:
        self.read_digest, done = 0, 0  # of the batches before, over the ranks that share them
        for batch in islice(self._stream_batches(), None if self._most is None else self._most // self._batch_size):
            self.read_digest = total_digest(self.read_digest, batch.digest)
            self.position = done + (share(batch.total, self._ranks, self._rank)[0] if self.is_numbered else 0)
            done += batch.total
            if batch.size or self._lockstep:
                yield batch.batch, batch.size

    def _stream_batches(self) -> Iterable[StreamBatch]:
        dataset, collate = self._source.dataset, self._source.collate_fn
        if isinstance(dataset, DaliBatches):
            return dataset.batches()
        seeds = StreamSeeds.of(0, "evaluation", self._rank, splits_itself=self._splits_itself)
        if self._splits_itself:
            stream: Any = OwnStream(dataset, collate, seeds, self._batch_size)
        else:
            group = self._batch_size * (self._ranks if self._most is None else 1)  # the same samples on any ranks
            stream = SharedStream(dataset, collate, seeds, group=group, ranks=self._ranks, rank=self._rank)
        return open_stream(stream, seeds, self._options())
