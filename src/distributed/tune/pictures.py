"""A search as one picture, an SVG by itself: parallel coordinates above, learning curves below."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from distributed.observe.svg import Scale, line, page, text, trace
from distributed.tune.results import Board, short, varied
from distributed.tune.runner import TrialResult

FILE = "search.svg"
_WIDTH, _LEFT, _RIGHT = 960, 70, 70
_AXES_TOP, _AXES_HEIGHT = 92, 240
_CURVES_TOP, _CURVES_HEIGHT = 420, 240
_HEIGHT = _CURVES_TOP + _CURVES_HEIGHT + 60
_MOST_AXES = 10
_FEW = 5  # values that are all marked on their axis
# From the best to the worst; the colours stay apart in print and for eyes that see red and green alike.
_COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (222, 210, 60))
_STYLE = """
.title { font-size: 15px }
path { fill: none; stroke-width: 1.3; stroke-opacity: .75 }
path.best { stroke-width: 3.2; stroke-opacity: 1 }
path.stopped { stroke-dasharray: 5 3 }
"""


def write_picture(board: Board, run_dir: str) -> str:
    """Into the folder of the search; its path."""
    path = Path(run_dir, FILE)
    path.write_text(draw(board), encoding="utf-8")
    return str(path)


def draw(board: Board) -> str:
    """The picture as text."""
    trials = [trial for trial in board.trials if math.isfinite(_or_nan(board.value(trial)))]
    best = board.best
    if not trials or best is None:
        parts = [text(_WIDTH / 2, 60, "no trial has reported a metric", "title", "middle")]
    else:
        value = board.value(best)
        head = f"{len(board.trials)} trials; best: {best.id}, {board.metric} {short(value)}"
        settings = ", ".join(f"{n}={short(v)}" for n, v in best.params.items())[:150]
        parts = [text(_LEFT, 28, head, "title"), text(_LEFT, 46, settings, "small")]
        shade = _shades(board, trials)
        order = sorted(trials, key=lambda trial: trial.id == best.id)  # the best is drawn last, on top
        parts += [*_coordinates(board, order, best, shade), *_curves(board, order, best, shade)]
    return page(_WIDTH, _HEIGHT, parts, _STYLE)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _shades(board: Board, trials: Sequence[TrialResult]) -> dict[str, str]:
    """A colour for each trial by its rank, since one very bad value would make all others alike."""
    ranked = sorted(trials, key=lambda trial: _signed(board, trial))
    last = max(1, len(ranked) - 1)
    return {trial.id: _mix(place / last) for place, trial in enumerate(ranked)}


def _signed(board: Board, trial: TrialResult) -> float:
    value = board.value(trial)
    assert value is not None
    return value if board.mode == "min" else -value


def _mix(part: float) -> str:
    at = part * (len(_COLOURS) - 1)
    low = min(int(at), len(_COLOURS) - 2)
    mixed = [round(a + (b - a) * (at - low)) for a, b in zip(_COLOURS[low], _COLOURS[low + 1], strict=True)]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"


class _Axis:
    """Values to a place from 0 to 1: numbers by size, or by magnitude where they span many; all else by order."""

    def __init__(self, values: Sequence[Any]) -> None:
        kinds = {json.dumps(value, sort_keys=True): value for value in values}
        self._names = list(kinds)
        self.is_number = all(_is_number(value) for value in values)
        self.is_log = False
        if self.is_number:
            low, high = min(values), max(values)
            self.is_log = low > 0 and high / low >= 100
            self._scale = Scale(low, high, self.is_log)
            self.ticks: list[tuple[float, str]] = [(self.place(v), short(float(v))) for v in self._marks()]
        else:
            self._names.sort()
            self.ticks = [(self.place(kinds[name]), short(kinds[name])) for name in self._names]

    def _marks(self) -> list[float]:
        if len(self._names) <= _FEW:
            return [float(name) for name in self._names]
        low, high = self._scale.low, self._scale.high
        if self.is_log:
            return sorted({low, high} | {v for v in self._scale.decades if 0.06 < self.place(v) < 0.94})
        return [low + (high - low) * part / 4 for part in range(5)]

    def place(self, value: Any) -> float:
        if not self.is_number:
            last = len(self._names) - 1
            return self._names.index(json.dumps(value, sort_keys=True)) / last if last else 0.5
        return self._scale.place(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _coordinates(board: Board, trials: list[TrialResult], best: TrialResult, shade: dict[str, str]) -> list[str]:
    names = varied(trials)[:_MOST_AXES]
    columns: list[tuple[str, Callable[[TrialResult], Any]]] = [(name, partial(_param, name)) for name in names]
    columns.append((board.metric, board.value))
    bottom, parts, axes = _AXES_TOP + _AXES_HEIGHT, [], []
    labels: list[str] = []  # on top of the lines
    span = (_WIDTH - _LEFT - _RIGHT) / max(1, len(columns) - 1)
    for number, (name, value_of) in enumerate(columns):
        x, axis = _LEFT + span * number, _Axis([value_of(trial) for trial in trials])
        axes.append((x, axis, value_of))
        parts.append(line((x, _AXES_TOP), (x, bottom), "axis"))
        parts.append(text(x, _AXES_TOP - 12, name + (" (log)" if axis.is_log else ""), "", "middle"))
        is_last = number == len(columns) - 1
        for place, label in axis.ticks:
            y = bottom - place * _AXES_HEIGHT
            labels.append(text(x + (6 if is_last else -6), y + 4, label, "small", "start" if is_last else "end"))
    for trial in trials:
        points = [(x, bottom - axis.place(value_of(trial)) * _AXES_HEIGHT) for x, axis, value_of in axes]
        parts.append(_path(points, trial, best, shade))
    return parts + labels


def _param(name: str, trial: TrialResult) -> Any:
    return trial.params.get(name)


def _curves(board: Board, trials: list[TrialResult], best: TrialResult, shade: dict[str, str]) -> list[str]:
    curves = {
        trial.id: [
            (report.step, report.metrics[board.metric])
            for report in trial.history
            if math.isfinite(report.metrics.get(board.metric, math.nan))
        ]
        for trial in trials
    }
    points = [point for curve in curves.values() for point in curve]
    bottom = _CURVES_TOP + _CURVES_HEIGHT
    parts = [text(_LEFT, _CURVES_TOP - 16, f"{board.metric} over the steps of each trial", "title")]
    if not points:
        return parts
    values, last_step = _Axis([value for _, value in points]), max(step for step, _ in points)
    width = _WIDTH - _LEFT - _RIGHT

    def at(step: int, value: float) -> tuple[float, float]:
        x = _LEFT + width * ((step - 1) / (last_step - 1) if last_step > 1 else 0.5)
        return x, bottom - values.place(value) * _CURVES_HEIGHT

    for place, label in values.ticks:
        y = bottom - place * _CURVES_HEIGHT
        parts.append(line((_LEFT, y), (_WIDTH - _RIGHT, y), "grid"))
        parts.append(text(_LEFT - 6, y + 4, label, "small", "end"))
    for step in sorted({1, last_step} | {round(1 + (last_step - 1) * part / 4) for part in range(5)}):
        parts.append(text(at(step, points[0][1])[0], bottom + 18, str(step), "small", "middle"))
    for trial in trials:
        places = [at(step, value) for step, value in curves[trial.id]]
        if len(places) == 1:
            places.append((places[0][0] + 4, places[0][1]))
        if places:
            parts.append(_path(places, trial, best, shade))
    parts.append(text(_LEFT, bottom + 42, "dark: good, light: bad; thick: the best; dashed: stopped early", "small"))
    return parts


def _path(points: Sequence[tuple[float, float]], trial: TrialResult, best: TrialResult, shade: dict[str, str]) -> str:
    """A line that tells which trial it is when it is pointed at."""
    classes = [name for name, holds in (("best", trial.id == best.id), ("stopped", trial.status == "stopped")) if holds]
    about = f"trial {trial.id}, {trial.status}: " + ", ".join(f"{n}={short(v)}" for n, v in trial.params.items())
    drawn = f'class="{" ".join(classes)}" stroke="{shade[trial.id]}" d="{trace(points)}"'
    return f"<path {drawn}><title>{escape(about)}</title></path>"
