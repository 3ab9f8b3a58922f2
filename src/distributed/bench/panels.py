"""The panels of a benchmark's picture, one below the other: bars with their spread, and lines over axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from distributed.observe.svg import Scale, box, dot, line, page, short, text, trace

WIDTH, _EDGE, _TOP, _FOOT = 860, 20, 66, 34
_HEAD, _AXIS, _BELOW = 44, 18, 24  # of a panel: its title, the figures of its axis, the room to the next
_BAR, _GAP, _LIMIT = 20, 8, 14
_LINES = 230  # height of what lines are drawn on
_LETTER = 7.3  # the most that a letter takes on the average, in a wide font
_SMALL_LETTER = 6.6
_LEAST_MARGIN = 120
_BAND = "#eeeeee"
At = Callable[[float, float], tuple[float, float]]  # from values to a place on the page
_STYLE = """
.panel { font-size: 13px; font-weight: 600 }
.ours { font-weight: 700 }
.tick { font-size: 10px; fill: #888 }
.spread { stroke: #222; stroke-width: 1.3 }
.limit { stroke: #b3261e; stroke-width: 1.3; stroke-dasharray: 5 3 }
.each { fill-opacity: .45; stroke: #222; stroke-width: .6 }
path { fill: none; stroke-width: 2 }
path.dashed { stroke-dasharray: 6 4 }
"""


class Panel(Protocol):
    @property
    def height(self) -> float: ...

    @property
    def margin(self) -> float:
        """What it needs on the left."""

    def draw(self, top: float, left: float) -> Iterator[str]: ...


def stack(title: str, where: str, panels: Sequence[Panel], note: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    """The whole picture: what and where it was measured, the panels, what their signs mean.

    legend: names and their colours, of which those that are seen are shown.
    """
    left = max((panel.margin for panel in panels), default=0.0)
    parts, y = [text(_EDGE, 28, title, "title"), text(_EDGE, 47, where, "small")], float(_TOP)
    for panel in panels:
        parts += panel.draw(y, left)
        y += panel.height
    if not panels:
        parts.append(text(_EDGE, y + 16, "nothing was measured"))
        y += _HEAD
    bottom = y + _FOOT - 14
    parts.append(text(_EDGE, bottom, note, "small"))
    drawn = "\n".join(parts)
    signs = [(name, colour, 32 + len(name) * _SMALL_LETTER) for name, colour in legend if f'"{colour}"' in drawn]
    x = WIDTH - _EDGE - sum(width for *_, width in signs)
    if signs and x < _EDGE + len(note) * _SMALL_LETTER:  # not beside the note: below it
        bottom += 20
    for name, colour, width in signs:
        parts += [box(x, bottom - 10, 11, 11, colour), text(x + 16, bottom, name, "small")]
        x += width
    return page(WIDTH, int(bottom + 14), parts, _STYLE)


@dataclass(frozen=True)
class Bar:
    name: str
    value: float | None  # None: not measured, which is said
    label: str
    colour: str
    is_ours: bool = False
    spread: tuple[float, float] | None = None
    dots: tuple[float, ...] = ()  # each measurement of which the value is the middle

    @property
    def shown(self) -> list[float]:
        return [value for value in (self.value, *(self.spread or ()), *self.dots) if value is not None]

    @property
    def words(self) -> str:
        return self.label if self.value is not None else "not measured"


@dataclass(frozen=True)
class Bars:
    """A bar a row from zero to either side, with a line for a limit and a band for what is noise."""

    title: str
    about: str
    bars: tuple[Bar, ...]
    limit: tuple[float, str] | None = None
    band: tuple[float, float] | None = None

    @property
    def height(self) -> float:
        return self._head + self._body + _AXIS + _BELOW

    @property
    def margin(self) -> float:
        return max([_LEAST_MARGIN, *(_EDGE + 12 + len(bar.name) * _LETTER for bar in self.bars)])

    @property
    def _head(self) -> float:
        return _HEAD + (_LIMIT if self.limit else 0)

    @property
    def _body(self) -> float:
        return len(self.bars) * (_BAR + _GAP)

    def draw(self, top: float, left: float) -> Iterator[str]:
        width = WIDTH - left - 2 * _EDGE - max((len(bar.words) for bar in self.bars), default=0) * _LETTER
        values = [value for bar in self.bars for value in bar.shown] + [*(self.band or ()), *(self.limit or ())[:1]]
        scale = Scale(min([0.0, *values]), max([0.0, *values]) or 1.0)

        def at(value: float) -> float:
            return left + scale.place(value) * width

        begin, end = top + self._head - 4, top + self._head + self._body
        yield text(_EDGE, top + 16, self.title, "panel")
        yield text(_EDGE, top + 32, self.about, "small")
        if self.band:
            yield box(at(self.band[0]), begin, at(self.band[1]) - at(self.band[0]), end - begin, _BAND)
        for tick in scale.ticks:
            yield line((at(tick), begin), (at(tick), end), "grid" if tick else "axis")
            yield text(at(tick), end + 12, short(tick), "tick", "middle")
        for number, bar in enumerate(self.bars):
            y = top + self._head + number * (_BAR + _GAP)
            yield box(min(at(0), at(bar.value or 0)), y, abs(at(bar.value or 0) - at(0)), _BAR, bar.colour)
        if self.limit:  # over the bars that pass it, under what is written
            x = at(self.limit[0])
            yield line((x, begin), (x, end), "limit")
            yield text(x, begin - 4, self.limit[1], "small", "middle" if x > left + 60 else "start")
        for number, bar in enumerate(self.bars):
            y = top + self._head + number * (_BAR + _GAP) + _BAR / 2
            kind = "ours" if bar.is_ours else ""
            yield text(left - 8, y + 4, bar.name, kind, "end")
            for place, value in enumerate(bar.dots):
                yield dot(at(value), y + (place * 5 % 13 - 6), 2.5, "white", "each")
            if bar.spread and bar.spread[0] != bar.spread[1]:
                yield from _whisker((at(bar.spread[0]), y), (at(bar.spread[1]), y), (0, 4))
            yield text(max(at(value) for value in [0.0, *bar.shown]) + 8, y + 4, bar.words, kind)


class Point(NamedTuple):
    x: float
    y: float
    label: str = ""
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    name: str
    colour: str
    points: tuple[Point, ...]
    is_dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """A line a series, named at its end; both axes by size from zero, or both by magnitude."""

    title: str
    about: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    height = _HEAD + _LINES + _AXIS + _BELOW
    margin = 70.0

    def draw(self, top: float, left: float) -> Iterator[str]:
        yield text(_EDGE, top + 16, self.title, "panel")
        yield text(_EDGE, top + 32, self.about, "small")
        drawn = {series: points for series in self.series if (points := self._points(series))}
        if not drawn:
            yield text(left, top + _HEAD + 16, "not measured", "small")
            return
        points = [point for known in drawn.values() for point in known]
        beside = 10 + max(len(point.label) for point in points) * _LETTER / 2  # half of a label lies right of its point
        width = WIDTH - left - _EDGE - beside - max(len(series.name) for series in drawn) * _LETTER
        across, up = self._scales(points)
        begin, end = top + _HEAD, top + _HEAD + _LINES

        def at(x: float, y: float) -> tuple[float, float]:
            return left + across.place(x) * width, end - up.place(y) * _LINES

        for tick in up.ticks:
            yield line((left, at(across.low, tick)[1]), (left + width, at(across.low, tick)[1]), "grid")
            yield text(left - 8, at(across.low, tick)[1] + 4, short(tick), "tick", "end")
        for value, word in self.x_ticks:
            yield line((at(value, up.low)[0], begin), (at(value, up.low)[0], end), "grid")
            yield text(at(value, up.low)[0], end + 14, word, "tick", "middle")
        for series, known in drawn.items():
            yield from _curve(series, known, at)
        ends = [(at(known[-1].x, known[-1].y)[1], series) for series, known in drawn.items()]
        for y, series in _apart(ends):
            yield text(left + width + beside, y + 4, series.name, "", colour=series.colour)

    def _points(self, series: Series) -> list[Point]:
        """Those that have a place: none is without a value, and zero has no magnitude."""
        return [point for point in series.points if point.y is not None and (point.y > 0 or not self.is_log)]

    def _scales(self, points: list[Point]) -> tuple[Scale, Scale]:
        values = [value for point in points for value in (point.y, *(point.spread or ()))]
        places = [point.x for point in points]
        if not self.is_log:
            return Scale(0.0, max(places) or 1.0), Scale(0.0, max(values) * 1.05 or 1.0)
        known = [value for value in values if value > 0]
        low, high = 10.0 ** math.floor(math.log10(min(known))), 10.0 ** math.ceil(math.log10(max(known)))
        return Scale(min(places), max(places), is_log=True), Scale(low, max(high, low * 10), is_log=True)


def _curve(series: Series, points: list[Point], at: At) -> Iterator[str]:
    kind = ' class="dashed"' if series.is_dashed else ""
    yield f'<path{kind} stroke="{series.colour}" d="{trace([at(point.x, point.y) for point in points])}"/>'
    for point in points:
        x, y = at(point.x, point.y)
        if point.spread and min(point.spread) > 0 and point.spread[0] != point.spread[1]:
            yield from _whisker((x, at(point.x, point.spread[0])[1]), (x, at(point.x, point.spread[1])[1]), (3, 0))
        if not series.is_dashed:
            yield dot(x, y, 3.5, series.colour)
        if point.label:
            yield text(x, y + 20, point.label, "ours", "middle")


def _whisker(start: tuple[float, float], end: tuple[float, float], half: tuple[float, float]) -> Iterator[str]:
    """A line with a stroke across each end, which reaches so far to both sides."""
    yield line(start, end, "spread")
    for x, y in (start, end):
        yield line((x - half[0], y - half[1]), (x + half[0], y + half[1]), "spread")


def _apart(ends: list[tuple[float, Series]]) -> Iterator[tuple[float, Series]]:
    """From the top down, each as far below the one before that both can be read."""
    last = -math.inf
    for y, series in sorted(ends, key=lambda end: end[0]):
        last = max(y, last + 15)
        yield last, series
