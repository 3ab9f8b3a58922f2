"""What pictures are drawn with: text, lines, axes and the page, as SVG that needs no library and no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# White around letters keeps them readable where they cross a line.
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222; paint-order: stroke; stroke: white; stroke-width: 3px }
.title { font-size: 16px; font-weight: 600 }
.small { font-size: 11px; fill: #555 }
.grid { stroke: #e6e6e6; stroke-width: 1 }
.axis { stroke: #999; stroke-width: 1 }
"""
_TICKS = 5  # of a linear axis, about


def page(width: int, height: int, parts: Iterable[str], style: str = "") -> str:
    """A whole picture on white, with a style of its own after the one that all have."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><style>{_STYLE}{style.lstrip()}</style>'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", colour: str = "") -> str:
    """
    >>> text(1, 2, "a < b", "small")
    '<text x="1.0" y="2.0" class="small" text-anchor="start">a &lt; b</text>'
    """
    style = f' style="fill: {colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def line(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    return f'<line class="{kind}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def dot(x: float, y: float, radius: float, colour: str, kind: str = "") -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'


def trace(points: Sequence[tuple[float, float]]) -> str:
    """What a path's `d` says.

    >>> trace([(0, 1), (2.25, 3)])
    'M0.0,1.0 L2.2,3.0'
    """
    return "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)


@dataclass(frozen=True)
class Scale:
    """From a value to its place between 0 and 1, by size or by magnitude.

    >>> Scale(0, 4).place(1), Scale(1, 100, is_log=True).place(10), Scale(3, 3).place(3)
    (0.25, 0.5, 0.5)
    """

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        if self.low == self.high:
            return 0.5
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Round values on the scale.

        >>> Scale(-31, 1309).ticks, Scale(30, 2e4, is_log=True).ticks
        ([0.0, 500.0, 1000.0], [100.0, 1000.0, 10000.0])
        """
        if self.is_log:
            return self.decades or [self.low, self.high]
        step = _round_step((self.high - self.low) / _TICKS)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    @property
    def decades(self) -> list[float]:
        """The powers of ten on the scale."""
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]


def _round_step(least: float) -> float:
    """
    >>> _round_step(268), _round_step(0.03), _round_step(0.0)
    (500.0, 0.05, 1.0)
    """
    if least <= 0:
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(step for step in (magnitude * part for part in (1, 2, 5, 10)) if step >= least)


def short(value: float) -> str:
    """A number with three digits.

    >>> short(1234567.0), short(56789.0), short(123.4), short(-1500), short(0)
    ('1.23 M', '56.8 k', '123', '-1.5 k', '0')
    >>> short(999_999.0)
    '1 M'
    """
    value = float(f"{value:.3g}")
    for size, word in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:.3g}"
