"""What a search costs: the wall time of many small trials over the ideal, ours and plain Ray Tune interleaved.

The ideal is the sum of what the trials themselves took, by their own clocks, over the number of trials at a time. What
is more is the search's: starting processes, importing, telling, deciding, waiting.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.suite import importable
from benchmarks.suite.tuning.side import SIDES, WALL
from benchmarks.suite.tuning.trial import train_steps
from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.bench.processes import ended_by_signals, kill_all, start_command
from distributed.core.errors import LaunchError
from distributed.core.registry import is_installed

TARGET = 1.15  # times the ideal
_TIMEOUT_S = 900.0
_TRY_STEPS = 500  # by which a trial's length is set
_TAIL_LINES = 15
_NEEDS = {"ours on ray": "ray", "ray tune": "ray"}

Notify = Callable[[str, int, int], None]


class Search(NamedTuple):
    """What one search took."""

    wall_s: float
    trials_s: float  # the sum over its trials
    parallel: int

    @property
    def ratio(self) -> float:
        """
        >>> Search(wall_s=11.0, trials_s=20.0, parallel=2).ratio
        1.1
        """
        return self.wall_s / (self.trials_s / self.parallel)


@dataclass(frozen=True)
class TuningRow:
    side: str
    searches: tuple[Search, ...]

    @property
    def ratio(self) -> float:
        return median(search.ratio for search in self.searches)


@dataclass(frozen=True)
class TuningCost:
    """What the tuning benchmark found."""

    rows: tuple[TuningRow, ...]
    missing: tuple[str, ...]
    trials: int
    parallel: int
    steps: int
    repeats: int
    load_before: float | None
    load_after: float | None

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {
                "side": row.side,
                "ratio": round(row.ratio, 3),
                "searches": [
                    {"wall_s": round(s.wall_s, 3), "trials_s": round(s.trials_s, 3), "ratio": round(s.ratio, 3)}
                    for s in row.searches
                ],
            }
            for row in self.rows
        ]
        return {
            "benchmark": "tune",
            "unit": "wall seconds of a search over the ideal: the sum of its trials' seconds by trials at a time",
            "target_ratio": TARGET,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"trials": self.trials, "parallel": self.parallel, "steps": self.steps},
            "load_average": {"before": self.load_before, "after": self.load_after},
            "missing": list(self.missing),
            "rows": rows,
        }


def measure_tuning(
    *, trials: int, parallel: int, seconds: float, repeats: int, notify: Notify = lambda *_: None
) -> TuningCost:
    """Trials of about so many seconds each, on every side that is installed."""
    sides = [side for side in SIDES if is_installed(_NEEDS.get(side, ""))]
    found: dict[str, list[Search]] = {side: [] for side in sides}
    load_before, done = load_average(), 0
    notify("measuring a trial", done, repeats * len(sides))
    steps = _steps_of(seconds)
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        for number in range(repeats):
            for side in sides if number % 2 == 0 else sides[::-1]:
                notify(f"{side}: search {number + 1} of {repeats}", done, repeats * len(sides))
                where = os.path.join(folder, f"{side.replace(' ', '-')}-{number}")
                found[side].append(time_search(side, where, steps=steps, trials=trials, parallel=parallel))
                done += 1
    notify("done", done, done)
    rows = tuple(TuningRow(side, tuple(searches)) for side, searches in found.items())
    missing = tuple(side for side in SIDES if side not in sides)
    return TuningCost(rows, missing, trials, parallel, steps, repeats, load_before, load_average())


def _steps_of(seconds: float) -> int:
    train_steps(_TRY_STEPS // 5, 0.01, lambda metrics: None)  # first calls
    began = time.process_time()
    train_steps(_TRY_STEPS, 0.01, lambda metrics: None)
    return max(1, int(_TRY_STEPS * seconds / (time.process_time() - began)))


def time_search(side: str, folder: str, *, steps: int, trials: int, parallel: int) -> Search:
    """One search in a process of its own."""
    os.makedirs(folder)
    said = Path(folder, "output.log")
    words = [side, folder, str(steps), str(trials), str(parallel)]
    with said.open("wb") as output:
        command = [sys.executable, "-m", "benchmarks.suite.tuning.side", *words]
        started = start_command(command, folder, output, importable())
        try:
            code: int | None = started.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_all(started)
    notes = [path.read_text(encoding="utf-8").split() for path in Path(folder).glob("trial-*") if not path.suffix]
    if code != 0 or len(notes) != trials:
        how = f"has not ended after {_TIMEOUT_S:.0f} s" if code is None else f"ended with exit code {code}"
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        raise LaunchError(
            f"the search of {side!r} {how}; {len(notes)} of {trials} trials were run", why="\n".join(lines)
        )
    wall_s = float(Path(folder, WALL).read_text(encoding="utf-8"))
    return Search(wall_s, sum(float(ended) - float(began) for began, ended, _ in notes), parallel)
