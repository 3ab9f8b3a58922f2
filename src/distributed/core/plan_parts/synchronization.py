"""SynchronizationPlan: when replicas meet, and what they do there."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.core.choices import Synchronization


@dataclass(frozen=True)
class SynchronizationPlan:
    """After which steps the weights of replicas that step alone are averaged.

    >>> plan = SynchronizationPlan("post_local_sgd", every=4, start=10)
    >>> [step for step in range(1, 20) if plan.meets_after(step)]
    [14, 18]
    """

    kind: Synchronization = "every_step"
    every: int = 1  # steps that a replica takes alone
    start: int = 0  # steps before the first of them, in which gradients are averaged
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    max_staleness: int = 0  # for asynchronous: updates that the parameters of a rank may lack

    @property
    def is_local(self) -> bool:
        """Whether replicas step alone, now or later."""
        return self.kind not in ("every_step", "asynchronous")

    @property
    def apart(self) -> int:
        """Steps by which ranks may be apart although none waits for another.

        >>> SynchronizationPlan().apart, SynchronizationPlan("local_sgd", every=16).apart
        (0, 16)
        """
        return self.every if self.is_local else self.max_staleness

    def meets_after(self, step: int) -> bool:
        """Whether the weights are averaged after this step; they are counted from 1."""
        alone = step - self.start
        return self.is_local and alone > 0 and alone % self.every == 0
