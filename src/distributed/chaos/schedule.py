"""When which fault comes: seeded, so that the same run can be had again. Pure: no clock, no I/O."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distributed.core.choices import ChaosKind

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_MARGIN = 0.05  # of a run's steps, at either end, in which no fault is wanted when they are spread


@dataclass(frozen=True)
class Arrival:
    """A fault that is to come: so long after the one before it was recovered, or at a step of the run."""

    kind: ChaosKind
    seed: int  # of the choices that only the moment allows: which rank, which file
    after_s: float = 0.0
    at_step: int = 0


def by_time(kinds: Sequence[ChaosKind], mtbf_s: float, seed: int) -> Iterator[Arrival]:
    """Faults without end, at exponential times with this mean, as of machines that do not age.

    >>> faults = by_time(["kill", "hang"], mtbf_s=10.0, seed=0)
    >>> {next(faults).kind, next(faults).kind} == {"kill", "hang"}
    True
    """
    numbers = random.Random(seed)
    for kind in _dealt(kinds, numbers):
        yield Arrival(kind, numbers.getrandbits(32), after_s=numbers.expovariate(1.0 / mtbf_s))


def by_steps(kinds: Sequence[ChaosKind], count: int, steps: int, seed: int) -> Iterator[Arrival]:
    """That many faults at random steps of a run that has `steps`.

    >>> [arrival.at_step for arrival in by_steps(["kill"], 3, 100, seed=1)]
    [13, 22, 77]
    """
    numbers = random.Random(seed)
    first, last = max(1, int(_MARGIN * steps)), max(1, int((1 - _MARGIN) * steps))
    at = sorted(numbers.randint(first, last) for _ in range(count))
    for step, kind in zip(at, _dealt(kinds, numbers), strict=False):
        yield Arrival(kind, numbers.getrandbits(32), at_step=step)


def _dealt(kinds: Sequence[ChaosKind], numbers: random.Random) -> Iterator[ChaosKind]:
    """Every kind once in a random order, then again: a short run has as many of them as it can."""
    while True:
        yield from numbers.sample(list(kinds), len(kinds))


def parse_span(text: str) -> float | None:
    """Seconds; None for what is no length of time.

    >>> parse_span("15s"), parse_span("2m"), parse_span("1.5"), parse_span("soon"), parse_span("0s")
    (15.0, 120.0, 1.5, None, None)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\s*", text)
    seconds = float(found.group(1)) * _UNITS_S[found.group(2) or "s"] if found else 0.0
    return seconds or None
