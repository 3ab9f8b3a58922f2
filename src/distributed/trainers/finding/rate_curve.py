"""LearningRateCurve: the loss over growing learning rates, and which of them a run should begin with."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from distributed.observe.charts import render, require_drawing, write_label

_SIZE = (9.6, 4.8)  # inches
_WINDOW = 10  # the losses of as large a part of the curve are taken together


@dataclass(frozen=True)
class LearningRateCurve:
    """What `Trainer.find_learning_rate` has measured: a loss for each rate, up to where it diverged.

    >>> rates = tuple(10 ** (place / 10 - 4) for place in range(40))
    >>> curve = LearningRateCurve(rates, tuple(1.0 if rate < 0.01 else 1 / (1 + 50 * rate) for rate in rates))
    >>> print(curve)
    learning rate 0.01: the loss falls fastest there
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls fastest, before its least; None: it never falls."""
        return suggest(self.rates, self.losses)

    def __str__(self) -> str:
        rate = self.suggestion
        if rate is None:
            return f"the loss falls at no learning rate from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        return f"learning rate {rate:.3g}: the loss falls fastest there"

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve into an SVG; needs matplotlib."""
        require_drawing("the picture of a learning rate's curve")
        Path(path).write_bytes(render(self._fill, _SIZE))

    def _fill(self, figure: Any) -> None:
        axes = figure.add_axes((0.08, 0.13, 0.87, 0.7))
        axes.set_xscale("log")
        axes.grid()
        smooth = smoothed(self.losses)
        axes.plot(self.rates, self.losses, color="#bbbbbb", linewidth=1)
        axes.plot(self.rates[: len(smooth)], smooth, color="#3b528b", linewidth=2)
        axes.set_xlabel("learning rate")
        figure.text(0.03, 0.93, "loss over growing learning rates", size=13, weight="bold")
        figure.text(0.03, 0.88, "thin: of each step; thick: smoothed", size=8.5)
        rate = self.suggestion
        if rate is not None:
            axes.axvline(rate, color="#b3261e", linestyle="--", linewidth=1.2)
            height = smooth[self.rates.index(rate)]
            write_label(axes, f"{rate:.3g}", (rate, height), (6, 6), color="#b3261e")


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Of the smoothed losses before the least, the rate where they fall fastest over the rate's logarithm."""
    smooth = smoothed(losses)
    half = _half(losses)
    least = min(range(len(smooth)), key=smooth.__getitem__, default=0)
    slopes = {
        place: (smooth[place + half] - smooth[place - half]) / math.log(rates[place + half] / rates[place - half])
        for place in range(half, min(least + 1, len(smooth) - half))
    }
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    return None if steepest is None or slopes[steepest] >= 0 else rates[steepest]


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean around each loss; ends before the first that is not finite.

    >>> smoothed([1.0, 0.0, 0.5, 0.5, float("nan"), 0.1])
    [0.5, 0.5, 0.3333333333333333, 0.5]
    """
    known = next((count for count, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    half = _half(losses)
    return [fmean(losses[max(0, at - half) : min(known, at + half + 1)]) for at in range(known)]


def _half(losses: Sequence[float]) -> int:
    """How many losses to either side are taken together."""
    return max(1, len(losses) // (2 * _WINDOW))
