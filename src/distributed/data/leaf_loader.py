"""LeafLoader: this rank's leaves of every step, the same leaves whichever rank holds them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from distributed.core.plan import BatchPlan
from distributed.data.leaves import Leaf, LeafIndices, LeafReader, as_read
from distributed.data.loader import Microbatch, Step, TrainLoader, epoch_order
from distributed.data.shares import EpochCut
from distributed.data.source import Source


class _Leaves:
    """The sampler of our DataLoader: the leaves that the current pass reads."""

    def __init__(self) -> None:
        self.leaves: Iterator[LeafIndices] = iter(())

    def __iter__(self) -> Iterator[LeafIndices]:
        return self.leaves


class LeafLoader(TrainLoader):
    """A TrainLoader whose micro-batches are leaves; an empty leaf is not read."""

    def __init__(self, source: Source, batch: BatchPlan, rank: int, *, seed: int, pin_memory: bool = False) -> None:
        self._source, self._batch, self._rank, self._seed = source, batch, rank, seed
        self._leaves = _Leaves()
        self._taken: list[list[int]] = []
        self._loader = DataLoader(
            LeafReader(source.dataset, source.collate_fn),
            batch_size=None,
            sampler=self._leaves,
            collate_fn=as_read,
            generator=torch.Generator(),  # each leaf has its own seed; this keeps the loader off the main generator
            **source.loader_options(pin_memory=pin_memory),
        )

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        order = epoch_order(self._source, self._seed, epoch)
        cut = EpochCut(len(order), self._batch, self._rank)
        self._leaves.leaves = self._index_lists(order, cut, epoch, first_step)
        batches = iter(self._loader)
        for step in range(first_step, cut.steps):
            cuts = cut.cuts(step)
            leaves = [
                Microbatch(next(batches) if c.size else None, c.weight, c.size, leaf)
                for c, leaf in zip(cuts, self._numbered(cut, epoch, step), strict=True)
            ]
            self._taken = [list(order[c.start : c.stop]) for c in cuts]
            yield Step(leaves, cut.samples_in(step))

    def _numbered(self, cut: EpochCut, epoch: int, step: int) -> list[Leaf]:
        first = Leaf.of(self._seed, epoch, step, cut.first_leaf)
        return [first._replace(number=first.number + n) for n in range(self._batch.leaves // self._batch.ranks)]

    def _index_lists(
        self, order: list[int] | range, cut: EpochCut, epoch: int, first_step: int
    ) -> Iterator[LeafIndices]:
        for step in range(first_step, cut.steps):
            for c, leaf in zip(cut.cuts(step), self._numbered(cut, epoch, step), strict=True):
                if c.size:
                    yield LeafIndices(leaf.loading_seed, list(order[c.start : c.stop]))
