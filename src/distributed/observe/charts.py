"""Charts by matplotlib, as SVG or PNG: bars with their spread, and lines over axes, one panel below the other.

The same values give the same bytes: no date, no random ids, no settings of the user's own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed.core.registry import Entry, import_extra, is_installed, require_installed

FORMATS = ("svg", "png")
_EXTRA = Entry("matplotlib:figure", "matplotlib", "pictures")
_WIDTH = 9.6  # inches
_DARK, _GREY, _LIMIT, _BAND = "#222222", "#666666", "#b3261e", "#eeeeee"
_STYLE = {
    "svg.fonttype": "none",  # texts stay texts: they can be searched, and read aloud
    "svg.hashsalt": "distributed",
    "font.size": 9.5,
    "text.color": _DARK,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _DARK,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "grid.color": "#e6e6e6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "text.parse_math": False,
}
# In inches: a bar, a panel's title, its axis, what lines need; above all panels; the edge; a letter, about.
_BAR, _HEAD, _TAIL, _LINES, _ABOVE, _EDGE, _LETTER = 0.3, 0.62, 0.42, 2.9, 0.75, 0.2, 0.083
_SMALL = {"size": 8.5, "color": _GREY}


class Bar(NamedTuple):
    name: str
    value: float | None  # None: not measured, which is said
    label: str
    colour: str
    is_ours: bool = False
    spread: tuple[float, float] | None = None
    dots: tuple[float, ...] = ()  # each measurement of which the value is the middle

    @property
    def words(self) -> str:
        return self.label if self.value is not None else "not measured"

    @property
    def end(self) -> float:
        """The largest of what is drawn of it."""
        return max([0.0, self.value or 0.0, *(self.spread or ()), *self.dots])


@dataclass(frozen=True)
class Bars:
    """A bar a row from zero to either side, with a line for a limit and a band for what is noise."""

    title: str
    about: str
    bars: tuple[Bar, ...]
    limit: tuple[float, str] | None = None
    band: tuple[float, float] | None = None

    @property
    def head(self) -> float:
        return _HEAD + (0.18 if self.limit else 0)

    @property
    def height(self) -> float:
        return self.head + max(1, len(self.bars)) * _BAR + _TAIL  # an empty panel has axes too

    @property
    def margins(self) -> tuple[float, float]:
        """What names need on the left and labels on the right."""
        name = max((len(bar.name) for bar in self.bars), default=0)
        label = max((len(bar.words) for bar in self.bars), default=0)
        return 0.35 + _LETTER * name, 0.3 + _LETTER * label

    def draw(self, axes: Any) -> None:
        places = range(len(self.bars))
        axes.set_ylim(max(1, len(self.bars)) - 0.4, -0.6)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0, labelcolor=_DARK)
        axes.spines["left"].set_visible(False)
        axes.axvline(0, color=_GREY, linewidth=0.8)
        axes.set_yticks(places, [bar.name for bar in self.bars])
        axes.xaxis.set_major_formatter(lambda value, place: short(value))
        if self.band:
            axes.axvspan(*self.band, color=_BAND, zorder=0)
        values, colours = [bar.value or 0.0 for bar in self.bars], [bar.colour for bar in self.bars]
        axes.barh(places, values, height=0.7, color=colours, gid="bar")
        self._draw_spread(axes)
        for place, (bar, name) in enumerate(zip(self.bars, axes.get_yticklabels(), strict=True)):
            weight = "bold" if bar.is_ours else "normal"
            name.set_fontweight(weight)
            write_label(axes, bar.words, (bar.end, place), (5, 0), va="center", weight=weight)
        if self.limit:
            axes.axvline(self.limit[0], color=_LIMIT, linewidth=1.2, linestyle=(0, (5, 3)), gid="limit")
            write_label(axes, self.limit[1], (self.limit[0], -0.6), (0, 3), ha="center", color=_LIMIT, size=8)

    def _draw_spread(self, axes: Any) -> None:
        """Each measurement as a dot, and the spread as a line with caps."""
        dots = [
            (value, place + (number * 5 % 13 - 6) / 24)
            for place, bar in enumerate(self.bars)
            for number, value in enumerate(bar.dots)
        ]
        if dots:
            look = {"markersize": 3.5, "markeredgecolor": _DARK, "color": "white", "gid": "measurements"}
            axes.plot(*zip(*dots, strict=True), "o", **look)
        spreads = [
            (place, *bar.spread) for place, bar in enumerate(self.bars) if bar.spread and bar.spread[0] != bar.spread[1]
        ]
        if spreads:
            middles = [(low + high) / 2 for _, low, high in spreads]
            errors = [(high - low) / 2 for _, low, high in spreads]
            look = {"color": _DARK, "capsize": 2.5, "linewidth": 1}
            axes.errorbar(middles, [place for place, *_ in spreads], xerr=errors, fmt="none", **look)


class Point(NamedTuple):
    x: float
    y: float | None
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
    """A line a series, named at its end; both axes linear from zero, or both logarithmic."""

    title: str
    about: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    head = _HEAD
    height = _HEAD + _LINES + _TAIL

    @property
    def margins(self) -> tuple[float, float]:
        return 0.75, 0.45 + _LETTER * max((len(series.name) for series in self.series), default=0)

    def draw(self, axes: Any) -> None:
        drawn = {series: points for series in self.series if (points := self._points(series))}
        if not drawn:
            axes.set_axis_off()
            axes.text(0, 0.5, "not measured", transform=axes.transAxes)
            return
        if self.is_log:
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.grid()
        for series, points in drawn.items():
            axes.plot(
                [point.x for point in points],
                [point.y for point in points],
                color=series.colour,
                linestyle="--" if series.is_dashed else "-",
                marker="" if series.is_dashed else "o",
                markersize=4,
            )
            for point in points:
                self._annotate(axes, point, series)
        if not self.is_log:
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
        axes.set_xticks([value for value, _ in self.x_ticks], [word for _, word in self.x_ticks])
        axes.xaxis.set_minor_locator(_module("ticker").NullLocator())
        axes.yaxis.set_major_formatter(lambda value, place: short(value))
        axes.yaxis.set_minor_formatter(_module("ticker").NullFormatter())
        self._name_lines(axes, drawn)

    def _points(self, series: Series) -> list[Point]:
        """Those that have a place: none is without a value, and zero has no magnitude."""
        return [point for point in series.points if point.y is not None and (point.y > 0 or not self.is_log)]

    def _annotate(self, axes: Any, point: Point, series: Series) -> None:
        if point.spread and min(point.spread) > 0 and point.spread[0] != point.spread[1]:
            low, high = point.spread
            axes.vlines(point.x, low, high, color=series.colour, linewidth=1.5)
        if point.label:
            write_label(axes, point.label, (point.x, point.y), (0, -14), ha="center", weight="bold")

    def _name_lines(self, axes: Any, drawn: dict[Series, list[Point]]) -> None:
        """At their ends, from the top down, each as far below the one before that both can be read."""
        height = _LINES * 72  # points
        places = []
        for series, points in drawn.items():
            _, y = axes.transAxes.inverted().transform(axes.transData.transform((points[-1].x, points[-1].y)))
            places.append((y * height, series))
        last = float("inf")
        for place, series in sorted(places, key=lambda pair: -pair[0]):
            last = min(place, last - 13)
            write_label(
                axes, series.name, (1, 0), (8, last), xycoords="axes fraction", va="center", color=series.colour
            )


@dataclass(frozen=True)
class Sheet:
    """A whole picture: what and where it was measured, the panels, what their signs mean."""

    title: str
    where: str
    panels: Sequence[Bars | Lines]
    note: str
    legend: Sequence[tuple[str, str]] = ()  # names and their colours, of which those that are seen are shown

    def render(self, form: str = "svg") -> bytes:
        """The bytes of a file in one of `FORMATS`."""
        below = 0.5 + (0.25 if self._signs else 0)
        height = _ABOVE + below + (sum(panel.height for panel in self.panels) or 0.5)
        return render(lambda figure: self._fill(figure, height, below), (_WIDTH, height), form)

    @property
    def _signs(self) -> list[tuple[str, str]]:
        seen = {bar.colour for panel in self.panels if isinstance(panel, Bars) for bar in panel.bars}
        return [(name, colour) for name, colour in self.legend if colour in seen]

    def _fill(self, figure: Any, height: float, below: float) -> None:
        def write(y: float, words: str, **style: Any) -> None:
            figure.text(_EDGE / _WIDTH, y / height, words, **style)

        write(height - 0.28, self.title, size=13, weight="bold")
        write(height - 0.5, self.where, **_SMALL)
        write(0.2, self.note, **_SMALL)
        if not self.panels:
            write(below + 0.2, "nothing was measured")
        top = height - _ABOVE
        for panel in self.panels:
            write(top - 0.2, panel.title, weight="bold")
            write(top - 0.38, panel.about, **_SMALL)
            left, right = panel.margins
            bottom, body = top - panel.height + _TAIL, panel.height - panel.head - _TAIL
            place = (left / _WIDTH, bottom / height, 1 - (left + right) / _WIDTH, body / height)
            panel.draw(figure.add_axes(place))
            top -= panel.height
        if self._signs:
            handles = [_module("patches").Patch(color=colour, label=name) for name, colour in self._signs]
            where = {"loc": "lower left", "bbox_to_anchor": (0.1 / _WIDTH, 0.27 / height)}
            figure.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=8.5, borderpad=0.2, **where)


def render(fill: Callable[[Any], None], size: tuple[float, float], form: str = "svg") -> bytes:
    """A figure of that size in inches, as the bytes of a file; `fill` draws on it."""
    matplotlib = import_extra("matplotlib", _EXTRA.extra, "a picture")
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = _module("figure").Figure(figsize=size)
        fill(figure)
        file = io.BytesIO()
        figure.savefig(file, format=form, dpi=130, metadata=metadata)
    return file.getvalue()


def write_label(axes: Any, words: str, place: tuple[float, Any], offset: tuple[float, float], **style: Any) -> None:
    """Words at a place, moved by that many points, over all lines; they may leave the axes."""
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.annotate(
        words, place, offset, textcoords="offset points", annotation_clip=False, bbox=ground, zorder=5, **style
    )


def require_drawing(wanted_by: str) -> None:
    """An error that names the extra, unless it is installed."""
    require_installed(_EXTRA, wanted_by)


def why_not_drawn() -> str:
    """What installs the extra; "": it is installed."""
    return "" if is_installed(_EXTRA.needs) else _EXTRA.brought_by


def _module(name: str) -> Any:
    return import_extra(f"matplotlib.{name}", _EXTRA.extra, "a picture")


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
