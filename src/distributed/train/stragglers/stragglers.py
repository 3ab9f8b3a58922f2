"""Stragglers: which rank stays slower than its peers, and by what, from what each of them says of itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from distributed.core.events import RankSlow
from distributed.train.stragglers.pace import RankPace

_RATIO = 1.3  # times the median of the ranks
_LEAST_PART = 0.02  # of a step: less is not worth a word
_LEAST_S = 0.001  # noise of a clock and a scheduler
_READINGS = 3  # in a row
_LINK_RATIO = 3.0  # times the median of the links of others
_LINK_LEAST_S = 0.001


class Stragglers:
    """Reports a slow rank once, and again when it was back to normal in between or something else slows it.

    >>> stragglers, paces = Stragglers(), [RankPace(0.0, 0.1), RankPace(0.0, 0.1), RankPace(0.2, 0.1)]
    >>> for step in (50, 100, 150, 200):
    ...     for event in stragglers.look(paces, step=step, step_s=0.5, time=0.0):
    ...         print(event.step, event.rank, event.cause, round(event.ratio, 1))
    150 2 data 3.0
    """

    def __init__(self) -> None:
        self._row: dict[int, tuple[str, int]] = {}  # of each rank that was slow in the last reading: why, how often
        self._reported: dict[int, str] = {}

    def look(self, paces: Sequence[RankPace], *, step: int, step_s: float, time: float) -> list[RankSlow]:
        """The ranks to report now; `step_s` is how long a whole step took, waiting included."""
        if len(paces) < 2:
            return []
        found = slow_ranks(paces, step_s)
        probed = all(pace.link_s > 0 for pace in paces)
        if probed:
            found = _far(paces) | found  # a rank that is slow itself answers late: that is not its link
        events = []
        for rank in range(len(paces)):
            if rank not in found:
                if probed or self._row.get(rank, ("", 0))[0] != "communication":  # else it was not measured
                    self._row.pop(rank, None)
                    self._reported.pop(rank, None)
                continue
            cause, ratio, seconds = found[rank]
            before, count = self._row.get(rank, (cause, 0))
            count = count + 1 if before == cause else 1
            self._row[rank] = (cause, count)
            if count >= _READINGS and self._reported.get(rank) != cause:
                self._reported[rank] = cause
                events.append(RankSlow(time=time, rank=rank, step=step, ratio=ratio, cause=cause, seconds=seconds))
        return events


_Slow = dict[int, tuple[str, float, float]]  # by rank: cause, ratio, seconds


def slow_ranks(paces: Sequence[RankPace], step_s: float) -> _Slow:
    """By their own time. Of an even number of ranks the lower median: of two, the quicker is the measure."""
    usual = median_low(pace.own_s for pace in paces)
    data, compute = median_low(pace.data_s for pace in paces), median_low(pace.compute_s for pace in paces)
    found: _Slow = {}
    for rank, pace in enumerate(paces):
        excess = pace.own_s - usual
        if pace.own_s >= _RATIO * usual and excess >= max(_LEAST_S, _LEAST_PART * step_s):
            cause = "data" if pace.data_s - data > pace.compute_s - compute else "compute"
            found[rank] = (cause, pace.own_s / usual if usual else float(len(paces)), pace.own_s)
    return found


def _far(paces: Sequence[RankPace]) -> _Slow:
    """By their links: one slow link may be the fault of either end, two alike are that of the rank between them."""
    found: _Slow = {}
    for rank, pace in enumerate(paces):
        before = (rank - 1) % len(paces)
        others = [other.link_s for number, other in enumerate(paces) if number not in (rank, before)]
        quicker, slower = sorted((pace.link_s, paces[before].link_s))
        if others and quicker >= max(_LINK_LEAST_S, _LINK_RATIO * median_low(others), slower / _LINK_RATIO):
            found[rank] = ("communication", quicker / median_low(others), quicker)
    return found
