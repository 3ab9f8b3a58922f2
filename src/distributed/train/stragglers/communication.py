"""CommunicationShare: how much of a step's reduction its backward pass hides, from what each rank says of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distributed.train.stragglers.pace import RankPace


class CommunicationShare(NamedTuple):
    """Of one step."""

    seconds: float  # that its gradients take over the ranks by themselves
    exposed_s: float  # that the step waited for
    backward_s: float

    @property
    def hidden(self) -> float:
        """The part of the reduction that the step did not wait for.

        >>> CommunicationShare(seconds=0.2, exposed_s=0.05, backward_s=0.5).hidden
        0.75
        """
        return max(0.0, 1.0 - self.exposed_s / self.seconds)

    def __str__(self) -> str:
        """
        >>> print(CommunicationShare(seconds=0.2, exposed_s=0.05, backward_s=0.5))
        gradients take 200.0 ms over the ranks by themselves, 75 % of it hidden by the backward pass
        """
        time, part = f"{1e3 * self.seconds:.1f} ms", f"{100 * self.hidden:.0f} %"
        return f"gradients take {time} over the ranks by themselves, {part} of it hidden by the backward pass"

    @property
    def of_possible(self) -> float:
        """The same over the most that a backward pass of this length can hide; a rank that is late hides more.

        >>> CommunicationShare(seconds=0.5, exposed_s=0.375, backward_s=0.25).of_possible
        0.5
        """
        possible = min(self.seconds, self.backward_s)
        return min(1.0, max(0.0, self.seconds - self.exposed_s) / possible) if possible else 0.0


def share_of(paces: Sequence[RankPace]) -> CommunicationShare | None:
    """None: no rank has measured it.

    A rank that is early waits for the others, which is not communication: the shortest wait counts.

    >>> share_of([RankPace(0, 0, 0, 0.1, 0.02, 0.3), RankPace(0, 0, 0, 0.1, 0.07, 0.25)])
    CommunicationShare(seconds=0.1, exposed_s=0.02, backward_s=0.3)
    """
    if not paces or not all(pace.reduction_s for pace in paces):
        return None
    seconds, backward_s = max(pace.reduction_s for pace in paces), max(pace.backward_s for pace in paces)
    return CommunicationShare(seconds, min(pace.exposed_s for pace in paces), backward_s)
