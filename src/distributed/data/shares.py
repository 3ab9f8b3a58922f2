"""Who takes which samples: pure arithmetic over positions in the epoch's order.

A step takes the next `global_batch` positions, cut into micro-batches of `per_device × ranks`, and each of these is
shared by all ranks. The last step takes what is left, so every position is used once; where that does not divide,
shares differ in size, and the weights make the sum of the ranks' gradients that of one process. Where the plan has
`leaves`, the whole global batch is shared by these virtual ranks instead, and each rank holds as many of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from distributed.core.batch_plan import BatchPlan
from distributed.core.errors import DataError
from distributed.core.plan import Plan


def share(count: int, parts: int, part: int) -> tuple[int, int]:
    """The range that `part` of `parts` takes of `count` positions; the first ones take one more where it must be.

    >>> [share(5, 3, part) for part in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    size, more = divmod(count, parts)
    start = part * size + min(part, more)
    return start, start + size + (part < more)


class MicroCut(NamedTuple):
    """One rank's part of one micro-batch."""

    start: int  # positions in the epoch's order
    stop: int
    first: int  # the micro-batch's first position, which stands in where the share is empty
    weight: float  # this share's part of the step's mean, times the number of ranks (but not for a virtual rank)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def read(self) -> tuple[int, int]:
        """The positions that are read for it."""
        return (self.start, self.stop) if self.size else (self.first, self.first + 1)


@dataclass(frozen=True)
class EpochSplit:
    """One rank's shares of every step of an epoch of `samples` samples."""

    samples: int
    batch: BatchPlan
    rank: int

    @property
    def steps(self) -> int:
        return self.batch.steps(self.samples)

    @property
    def full_steps(self) -> int:
        return min(self.steps, self.samples // self.batch.global_batch)

    @property
    def micro_batches(self) -> int:
        """How many a rank reads; the last step may have fewer than the others.

        >>> from distributed.core.plan import BatchPlan
        >>> EpochSplit(20, BatchPlan(8, accumulation=2), 0).micro_batches
        3
        """
        whole = self.full_steps * len(self.micro_cuts(0)) if self.full_steps else 0
        return whole + sum(len(self.micro_cuts(step)) for step in range(self.full_steps, self.steps))

    def samples_in(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return min(self.batch.global_batch, self.samples - step * self.batch.global_batch)

    def cuts(self, step: int) -> list[MicroCut]:
        """What this rank takes in a step, in order."""
        return self.virtual_cuts(step) if self.batch.leaves else self.micro_cuts(step)

    def micro_cuts(self, step: int) -> list[MicroCut]:
        start, total = step * self.batch.global_batch, self.samples_in(step)
        cuts = []
        for first in range(start, start + total, self.batch.micro_batch):
            size = min(self.batch.micro_batch, start + total - first)
            low, high = share(size, self.batch.ranks, self.rank)
            cuts.append(MicroCut(first + low, first + high, first, (high - low) * self.batch.ranks / total))
        return cuts

    def spans(self, first_step: int) -> Iterator[tuple[int, int]]:
        """The positions that are read, micro-batch by micro-batch; of an empty share, those of its stand-in."""
        size = self.batch.global_batch
        shape = [micro.read for micro in self.micro_cuts(0)] if self.full_steps else []
        for base in range(first_step * size, self.full_steps * size, size):
            for start, stop in shape:
                yield base + start, base + stop
        for step in range(max(first_step, self.full_steps), self.steps):
            for micro in self.micro_cuts(step):
                yield micro.read

    @property
    def first_virtual_rank(self) -> int:
        return self.rank * (self.batch.leaves // self.batch.ranks)

    def virtual_cuts(self, step: int) -> list[MicroCut]:
        """This rank's virtual ranks of a step, in order. Their weights are parts of the step's mean: over all ranks,
        they add up to 1. Who holds one has no influence on what is in it."""
        start, total, leaves = step * self.batch.global_batch, self.samples_in(step), self.batch.leaves
        filled = max(1, min(leaves, total // self.batch.least_leaf))
        cuts = []
        for number in range(self.first_virtual_rank, self.first_virtual_rank + leaves // self.batch.ranks):
            low, high = share(total, filled, number) if number < filled else (total, total)
            cuts.append(MicroCut(start + low, start + high, start, (high - low) / total))
        return cuts


def most_evaluated(plan: Plan, samples: int | None, own_size: int | None, *, drop_last: bool = False) -> int | None:
    """Samples of an evaluation whose data has batches of this size, over all ranks; None: all that there are.

    Data without a size of its own is counted in global batches, so that the number of ranks has no part in it.

    >>> from distributed.core.plan import DataPlan
    >>> plan = Plan("run", BatchPlan(8), data=DataPlan(evaluation=0.5))
    >>> most_evaluated(plan, 40, 16), most_evaluated(plan, 40, 4)
    (16, 20)
    """
    asked, size = plan.data.evaluation, own_size or plan.batch.global_batch
    if plan.data.overfits and samples is not None:  # those that are trained on
        return min(samples, plan.batch.steps(samples) * plan.batch.global_batch)
    if asked is None or isinstance(asked, int):
        return None if asked is None else asked * size
    if samples is None:
        raise DataError(
            f"limit_val_batches={asked} of a stream",
            why="its length is not known, and so no part of it",
            do="set it to a number of batches",
        )
    batches = samples // size if drop_last else -(-samples // size)
    if asked and not int(asked * batches):
        raise DataError(
            f"limit_val_batches={asked} of {batches} batches",
            why="that part of an evaluation has no whole batch",
            do="set limit_val_batches=1, or a larger part",
        )
    return int(asked * batches) * size


def stream_weights(counts: list[int], total: int, ranks: int) -> list[float]:
    """The same weights for shares whose sizes are known only after they were read."""
    return [count * ranks / total for count in counts]
