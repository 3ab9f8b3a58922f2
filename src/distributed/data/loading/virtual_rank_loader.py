"""VirtualRankLoader: the virtual ranks that this rank holds of every step; their samples do not depend on the rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from distributed.core.batch_plan import BatchPlan
from distributed.data.drawn import Share, make_here
from distributed.data.loading.forks import ForkedLoader
from distributed.data.loading.loader import Microbatch, Order, Step, StepSamples, TrainLoader, numbers
from distributed.data.shares import EpochSplit
from distributed.data.source import Source
from distributed.data.virtual_ranks import ShareIndices, ShareReader, VirtualShare, as_read


class VirtualRankLoader(TrainLoader):
    """A TrainLoader whose micro-batches are virtual ranks; an empty one is not read."""

    def __init__(
        self,
        source: Source,
        batch: BatchPlan,
        rank: int,
        *,
        seed: int,
        pin_memory: bool = False,
        share: Share = make_here,
    ) -> None:
        self._begin(source, batch, rank, seed, share)
        self._loader = ForkedLoader(
            ShareReader(source.dataset, source.collate_fn),
            batch_size=None,
            sampler=self._reads,
            collate_fn=as_read,
            generator=torch.Generator(),  # each share has its own seed; this keeps the loader off the main generator
            **source.loader_options(pin_memory=pin_memory),
        )

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        self._check_lengths(epoch, first_step)
        order = self._order(epoch)
        cut = EpochSplit(len(order), self._batch, self._rank)
        batches = self._read(order, cut, epoch, first_step)
        for step in range(first_step, cut.steps):
            cuts = cut.cuts(step)
            microbatches = [
                Microbatch(next(batches) if c.size else None, c.weight, c.size, virtual_share)
                for c, virtual_share in zip(cuts, self._numbered(cut, epoch, step), strict=True)
            ]
            self.step_samples = StepSamples(order, cut, step)
            yield Step(microbatches, cut.samples_in(step))

    def _numbered(self, cut: EpochSplit, epoch: int, step: int) -> list[VirtualShare]:
        first = VirtualShare.of(self._seed, epoch, step, cut.first_virtual_rank)
        return [first._replace(number=first.number + n) for n in range(self._batch.leaves // self._batch.ranks)]

    def _keys(self, order: Order, cut: EpochSplit, epoch: int, first_step: int) -> Iterator[ShareIndices]:
        for step in range(first_step, cut.steps):
            for c, virtual_share in zip(cut.cuts(step), self._numbered(cut, epoch, step), strict=True):
                if c.size:
                    yield ShareIndices(virtual_share.loading_seed, numbers(order[c.start : c.stop]))
