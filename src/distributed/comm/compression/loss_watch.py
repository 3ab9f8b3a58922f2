"""LossWatch: whether training suffers from compressed gradients, by means of the loss over windows of steps. Pure.

windows ─ a mean below all before ─> the best one
        ─ above the best, clearly, twice in a row ─> it suffers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Any

WINDOW = 20  # steps
_ERRORS = 6.0  # standard errors of the difference of two means, above which no chance makes a mean rise
_RISE = 0.02  # part of the best mean by which the other has to be larger besides
_TWICE = 2


class LossWatch:
    """Compares the mean loss of each window with the lowest one so far.

    >>> watch = LossWatch()
    >>> watch.add([2.0, 2.1] * 10), watch.add([3.0, 3.1] * 10)
    ('', '')
    >>> watch.add([3.0, 3.1] * 10)
    'the loss is 3.05 in the mean of 20 steps, twice in a row, after 2.05 before'
    """

    def __init__(self) -> None:
        self._best: tuple[float, float] | None = None  # the mean, and the square of its standard error
        self._risen = 0  # windows in a row

    def add(self, losses: Sequence[float]) -> str:
        """The losses of whole batches in a window; returns why training suffers, or ""."""
        mean, count = fmean(losses), len(losses)
        if not math.isfinite(mean):
            return f"the loss is {mean} in the mean of {count} steps"
        error = variance(losses) / count if count > 1 else 0.0
        if self._best is None or mean < self._best[0]:
            self._best, self._risen = (mean, error), 0
            return ""
        best, best_error = self._best
        bound = max(_ERRORS * math.sqrt(error + best_error), _RISE * abs(best))
        self._risen = self._risen + 1 if mean - best > bound else 0
        if self._risen < _TWICE:
            return ""
        return f"the loss is {mean:.4g} in the mean of {count} steps, twice in a row, after {best:.4g} before"

    def state(self) -> dict[str, Any]:
        return {"best": None if self._best is None else list(self._best), "risen": self._risen}

    def load(self, state: Mapping[str, Any]) -> None:
        self._best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self._risen = int(state["risen"])
