"""Delay: what this rank alone costs the others, to decide whether a new process in its place is worth its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

from distributed.core.plan import Plan
from distributed.core.protocol.rank_protocol import LauncherLink, Slow
from distributed.runtime.session import Session
from distributed.train.stragglers.pace import RankPace
from distributed.train.stragglers.stragglers import slow_ranks

_READINGS = 10  # in a row


class Delay:
    """Adds up how long the others wait for this rank, over readings in a row in which it is slow.

    >>> delay, paces = Delay(rank=1, wait_s=12.0), [RankPace(0.0, 0.1), RankPace(0.0, 0.4)]
    >>> reasons = [delay.look(paces, step=step, step_s=0.5) for step in range(5, 100, 5)]
    >>> [reason for reason in reasons if reason]
    ['its compute takes 4.0 times the median of the ranks since step 5, and they have waited 14 s for it']
    """

    def __init__(self, rank: int, wait_s: float) -> None:
        self._rank, self._wait_s = rank, wait_s
        self._readings, self._waited_s = 0, 0.0
        self._since, self._last, self._has_asked = 0, 0, False

    def look(self, paces: Sequence[RankPace], *, step: int, step_s: float) -> str:
        """Why this rank should be replaced, once; empty while it should not. `step_s`: of a whole step."""
        steps, self._last = step - self._last, step
        found = slow_ranks(paces, step_s).get(self._rank) if len(paces) > 1 else None
        if found is None:
            self._readings, self._waited_s = 0, 0.0
            return ""
        cause, ratio, own_s = found
        if not self._readings:
            self._since = step
        else:  # of the steps before the first reading in which it was slow, not all may have been
            self._waited_s += steps * (own_s - median_low(pace.own_s for pace in paces))
        self._readings += 1
        if self._has_asked or self._readings < _READINGS or self._waited_s < self._wait_s:
            return ""
        self._has_asked = True
        return (
            f"its {cause} takes {ratio:.1f} times the median of the ranks since step {self._since}, "
            f"and they have waited {self._waited_s:.0f} s for it"
        )


Reader = Callable[[Sequence[RankPace], int, float], None]


def replacer(plan: Plan, session: Session, link: LauncherLink | None) -> Reader:
    """Reads the paces of all ranks, and asks the launcher to replace this one when `slow_rank` says so."""
    delay, attempt = Delay(session.rank, plan.slow_rank_wait_s), session.env.attempt

    def read(paces: Sequence[RankPace], step: int, step_s: float) -> None:
        if link is not None and plan.slow_rank == "replace" and (why := delay.look(paces, step=step, step_s=step_s)):
            link.tell(Slow(attempt, why))

    return read
