"""BatchPlan: how the global batch of a step is cut, and what stays of it at another number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut: `accumulation` micro-batches, each shared by all ranks; or into leaves, if any."""

    per_device: int
    ranks: int = 1
    accumulation: int = 1
    drop_last: bool = False
    whole: int = 0  # the global batch of a run whose number of ranks changed; 0: as the three numbers above say
    of_stream: bool = False
    leaves: int = 0  # virtual ranks among which a whole global batch is shared; 0: none, the ranks themselves share
    parts: int = 1  # into which a pipeline cuts each micro-batch that was asked for
    least_leaf: int = 1  # samples of a leaf, where a step has that many; a short step then has fewer leaves
    by_epoch: tuple[tuple[int, int], ...] = ()  # (epoch, `accumulation` from it on); none: always the same
    planned_ranks: int = 0  # for which `by_epoch` was asked, where their number has changed; 0: `ranks`
    limit: int = 0  # steps of an epoch at most; 0: all that its samples make

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-batch over all ranks; the last of a step may have fewer."""
        return -(-self.whole // self.accumulation) if self.whole else self.per_device * self.ranks

    @property
    def global_batch(self) -> int:
        return self.whole or self.micro_batch * self.accumulation

    def at(self, epoch: int) -> BatchPlan:
        """That of an epoch.

        >>> batch = BatchPlan(per_device=8, ranks=2, by_epoch=((0, 1), (4, 2)))
        >>> batch.at(3).global_batch, batch.at(4).global_batch, batch.for_ranks(1).at(4).global_batch
        (16, 32, 32)
        """
        if not self.by_epoch:
            return self
        count = max((start, count) for start, count in self.by_epoch if start <= epoch)[1]
        ranks = self.planned_ranks or self.ranks
        asked = replace(self, ranks=ranks, accumulation=count, whole=0, by_epoch=(), planned_ranks=0)
        return asked if ranks == self.ranks else asked.for_ranks(self.ranks)

    @property
    def most_accumulated(self) -> int:
        """Micro-batches of a step, at most."""
        return max([self.accumulation, *(self.at(epoch).accumulation for epoch, _ in self.by_epoch)])

    def for_ranks(self, ranks: int) -> BatchPlan:
        """The same global batch cut for another number of ranks, none of which gets more than `per_device` at once.

        >>> batch = BatchPlan(per_device=8, ranks=4).for_ranks(3)
        >>> batch.global_batch, batch.accumulation, batch.micro_batch
        (32, 2, 16)
        """
        whole = self.global_batch
        least = -(-whole // (self.per_device * ranks))
        # Even micro-batches are what a stream needs, and one that leaves no rank without a sample wastes nothing.
        even = [n for n in range(least, 2 * least + 1) if whole % n == 0 and whole // n >= ranks]
        planned = (self.planned_ranks or self.ranks) if self.by_epoch else 0
        return replace(self, ranks=ranks, accumulation=even[0] if even else least, whole=whole, planned_ranks=planned)

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of a step are of one size."""
        return self.micro_batch * self.accumulation == self.global_batch

    def steps(self, samples: int) -> int:
        """Optimizer steps in one pass over that many samples.

        >>> BatchPlan(8).steps(20), BatchPlan(8, drop_last=True).steps(20), BatchPlan(8, limit=1).steps(20)
        (3, 2, 1)
        """
        whole = samples // self.global_batch if self.drop_last else -(-samples // self.global_batch)
        return min(whole, self.limit) if self.limit else whole
