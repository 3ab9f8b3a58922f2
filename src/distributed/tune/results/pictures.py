"""A search as one picture: parallel coordinates above, learning curves below."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from distributed.observe.charts import render, why_not_drawn, write_label
from distributed.tune.results.results import Board, short, varied
from distributed.tune.runner import TrialResult
from distributed.tune.search_dir import SearchDir

_SIZE = (9.6, 7.2)  # inches
_MOST_AXES = 10
_FEW = 5  # values that are all marked on their axis
# From the best to the worst; the colours stay apart in print and for eyes that see red and green alike.
_COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (222, 210, 60))


def write_picture(board: Board, run_dir: str) -> str:
    """Into the folder of the search: its path, or what to install where it cannot be drawn."""
    path, missing = SearchDir(run_dir).picture, why_not_drawn()
    if missing:
        return f"{path.name} needs: {missing}"
    path.write_bytes(draw(board))
    return str(path)


def draw(board: Board) -> bytes:
    """The picture as the bytes of an SVG."""
    return render(partial(_fill, board), _SIZE)


def _fill(board: Board, figure: Any) -> None:
    trials = [trial for trial in board.trials if math.isfinite(_or_nan(board.value(trial)))]
    best = board.best
    if not trials or best is None:
        figure.text(0.5, 0.9, "no trial has reported a metric", size=13, ha="center")
        return
    head = f"{len(board.trials)} trials; best: {best.id}, {board.metric} {short(board.value(best))}"
    settings = ", ".join(f"{name}={short(value)}" for name, value in best.params.items())[:130]
    figure.text(0.03, 0.96, head, size=13, weight="bold")
    figure.text(0.03, 0.93, settings, size=8.5)
    styles = _styles(board, trials, best)
    _draw_settings(figure.add_axes((0.1, 0.53, 0.81, 0.33)), board, trials, styles)
    figure.text(0.03, 0.455, f"{board.metric} over the steps of each trial", weight="bold")
    _draw_curves(figure.add_axes((0.1, 0.1, 0.81, 0.33)), board, trials, styles)
    figure.text(0.03, 0.02, "dark: good, light: bad; thick: the best; dashed: stopped early", size=8.5)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _styles(board: Board, trials: Sequence[TrialResult], best: TrialResult) -> dict[str, dict[str, Any]]:
    """A line's look by trial: its colour by rank, since one very bad value would make all others alike."""
    ranked = sorted(trials, key=lambda trial: _signed(board, trial))
    last = max(1, len(ranked) - 1)
    return {
        trial.id: {
            "color": _mix(place / last),
            "linestyle": "--" if trial.status == "stopped" else "-",
            "linewidth": 3 if trial.id == best.id else 1.2,
            "zorder": 4 if trial.id == best.id else 2,
            "clip_on": False,
        }
        for place, trial in enumerate(ranked)
    }


def _signed(board: Board, trial: TrialResult) -> float:
    value = board.value(trial)
    assert value is not None
    return value if board.mode == "min" else -value


def _mix(part: float) -> tuple[float, float, float]:
    at = part * (len(_COLOURS) - 1)
    low = min(int(at), len(_COLOURS) - 2)
    red, green, blue = ((a + (b - a) * (at - low)) / 255 for a, b in zip(_COLOURS[low], _COLOURS[low + 1], strict=True))
    return red, green, blue


class _Axis:
    """Values to a place from 0 to 1: numbers by size, or by magnitude where they span many; all else by order."""

    def __init__(self, values: Sequence[Any]) -> None:
        kinds = {json.dumps(value, sort_keys=True): value for value in values}
        self._names = list(kinds)
        self.is_number = all(_is_number(value) for value in values)
        self.is_log = False
        if self.is_number:
            self._low, self._high = float(min(values)), float(max(values))
            self.is_log = self._low > 0 and self._high / self._low >= 100
            self.ticks: list[tuple[float, str]] = [(self.place(v), short(float(v))) for v in self._marks()]
        else:
            self._names.sort()
            self.ticks = [(self.place(kinds[name]), short(kinds[name])) for name in self._names]

    def _marks(self) -> list[float]:
        if len(self._names) <= _FEW:
            return [float(name) for name in self._names]
        low, high = self._low, self._high
        if self.is_log:
            decades = (10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
            return sorted({low, high} | {value for value in decades if 0.06 < self.place(value) < 0.94})
        return [low + (high - low) * part / 4 for part in range(5)]

    def place(self, value: Any) -> float:
        if not self.is_number:
            last = len(self._names) - 1
            return self._names.index(json.dumps(value, sort_keys=True)) / last if last else 0.5
        if self._low == self._high:
            return 0.5
        if self.is_log:
            return math.log(value / self._low) / math.log(self._high / self._low)
        return float((value - self._low) / (self._high - self._low))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _draw_settings(axes: Any, board: Board, trials: Sequence[TrialResult], styles: dict[str, dict[str, Any]]) -> None:
    """Parallel coordinates: an upright axis a setting and one for the metric, a line a trial."""
    names = varied(trials)[:_MOST_AXES]
    columns: list[tuple[str, Callable[[TrialResult], Any]]] = [(name, partial(_param, name)) for name in names]
    columns.append((board.metric, board.value))
    scales = [_Axis([value_of(trial) for trial in trials]) for _, value_of in columns]
    axes.set_axis_off()
    axes.set_xlim(0, max(1, len(columns) - 1))
    axes.set_ylim(0, 1)
    for x, ((name, _), scale) in enumerate(zip(columns, scales, strict=True)):
        axes.vlines(x, 0, 1, color="#666666", linewidth=0.8, clip_on=False)
        axes.text(x, 1.08, name + (" (log)" if scale.is_log else ""), ha="center")
        offset, side = ((5, 0), "left") if x == len(columns) - 1 else ((-5, 0), "right")
        for place, words in scale.ticks:
            write_label(axes, words, (x, place), offset, ha=side, va="center", size=8.5)
    for trial in trials:
        places = [scale.place(value_of(trial)) for (_, value_of), scale in zip(columns, scales, strict=True)]
        axes.plot(range(len(places)), places, gid=f"settings of {trial.id}", **styles[trial.id])


def _param(name: str, trial: TrialResult) -> Any:
    return trial.params.get(name)


def _draw_curves(axes: Any, board: Board, trials: Sequence[TrialResult], styles: dict[str, dict[str, Any]]) -> None:
    curves = {
        trial.id: [
            (report.step, report.metrics[board.metric])
            for report in trial.history
            if math.isfinite(report.metrics.get(board.metric, math.nan))
        ]
        for trial in trials
    }
    values = [value for curve in curves.values() for _, value in curve]
    if not values:
        axes.set_axis_off()
        return
    if min(values) > 0 and max(values) / min(values) >= 100:
        axes.set_yscale("log")
    axes.grid()
    axes.xaxis.get_major_locator().set_params(integer=True)
    for name, curve in curves.items():
        if curve:
            steps, reached = zip(*curve, strict=True)
            marker = "o" if len(curve) == 1 else ""
            axes.plot(steps, reached, marker=marker, gid=f"curve of {name}", **styles[name])
