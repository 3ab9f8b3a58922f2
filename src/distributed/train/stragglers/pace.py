"""Pace: what this rank's own part of a step takes, and on what, so that a slow rank can be found among its peers.

Ranks wait for each other in every step, so their steps take equally long; only the time before a rank begins to wait
is its own. Where ranks already wait for each other while they get a batch (iterable_split="dataset") or in the forward
pass (BatchNorm over all ranks), their times are alike, and no rank is called slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import NamedTuple, TypeVar

from distributed.strategies.compute_clock import ComputeClock
from distributed.train.stragglers.links import Links

T = TypeVar("T")


class RankPace(NamedTuple):
    """Means of one rank over the steps since the last reading."""

    data_s: float  # waiting for batches
    compute_s: float  # from a batch to the last backward pass
    link_s: float = 0.0  # a message to the next rank and back; 0 where it was not measured since the last reading
    reduction_s: float = 0.0  # of the last step's gradients by themselves; 0 where it was not measured
    exposed_s: float = 0.0  # of that, what its backward pass did not hide; with the wait for slower ranks
    backward_s: float = 0.0  # the backward pass of that step

    @property
    def own_s(self) -> float:
        return self.data_s + self.compute_s


class Pace:
    """`timed` goes around the loader; a reading of the meter carries `row` to all ranks and brings theirs back."""

    def __init__(self, rank: int, world_size: int, clock: ComputeClock, links: Links | None = None) -> None:
        self._rank, self._ranks, self._clock, self._links = rank, world_size, clock, links
        self._data_s, self._steps = 0.0, 0
        self._clock_from = clock.seconds

    def timed(self, steps: Iterable[T]) -> Iterator[T]:
        """The same steps; how long each was waited for is noted."""
        begun = perf_counter()
        for step in steps:
            self._data_s += perf_counter() - begun
            self._steps += 1
            yield step
            begun = perf_counter()

    def row(self) -> list[float]:
        """Numbers for each rank, those of the others 0, to be added up over the ranks; and what rank 0 wants."""
        if self._ranks == 1:
            return []
        width = len(RankPace._fields)
        numbers = [0.0] * (width * self._ranks + 1)
        numbers[width * self._rank : width * (self._rank + 1)] = self._take()
        numbers[-1] = float(self._links is not None and self._rank == 0 and self._links.is_due())
        return numbers

    def read(self, totals: list[float]) -> tuple[RankPace, ...]:
        """The rows of all ranks, after they were added up. Every rank comes here after the same step."""
        if not totals:
            return ()
        width = len(RankPace._fields)
        if totals[-1] and self._links is not None:
            self._links.probe()
        return tuple(RankPace(*totals[width * rank : width * (rank + 1)]) for rank in range(self._ranks))

    def _take(self) -> RankPace:
        """This rank's, since the last time."""
        steps = max(1, self._steps)
        data_s, compute_s = self._data_s / steps, (self._clock.seconds - self._clock_from) / steps
        if self._clock.device_seconds is not None:
            compute_s = self._clock.device_seconds
            data_s *= self._clock.was_idle  # a batch that came while the device was still busy delayed nothing
        self._data_s, self._steps, self._clock_from = 0.0, 0, self._clock.seconds
        timed = self._clock.reduction.take() if self._clock.reduction is not None else None
        return RankPace(data_s, compute_s, self._links.take() if self._links is not None else 0.0, *(timed or ()))
