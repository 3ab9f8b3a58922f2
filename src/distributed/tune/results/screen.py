"""A running search on the screen: a live table on a terminal, one line per event where it is piped."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from distributed.tune.results.results import Board, short, varied
from distributed.tune.runner import Exploit, Report, TrialResult, TrialSpec

_STYLES = {"running": "cyan", "done": "", "stopped": "dim", "failed": "red", "pending": "dim", "interrupted": "yellow"}
_MOST_ROWS = 24
_REDRAW_S = 0.1


class SearchScreen:
    """Draws a Board. `total` is the number of trials that are to come in all."""

    def __init__(
        self, board: Board, total: int, slots: int, *, shows_progress: bool = True, out: TextIO | None = None
    ) -> None:
        self._board, self._total, self._slots = board, total, slots
        self._console = Console(file=out or sys.stderr, soft_wrap=True, highlight=False)
        self._is_live = shows_progress and self._console.is_terminal
        self._says = shows_progress and not self._is_live
        self._began, self._drawn_at = time.monotonic(), 0.0
        self._live: Live | None = None
        if self._is_live:
            self._live = Live(console=self._console, get_renderable=self._draw, auto_refresh=False, transient=True)
            self._live.start()

    def started(self, trial: TrialSpec) -> None:
        again = f" again after {trial.attempt} failures" if trial.attempt else ""
        self._say(f"trial {trial.id} starts{again}: {_params(trial.params)}")

    def reported(self, report: Report) -> None:
        metrics = ", ".join(f"{name} {short(value)}" for name, value in _first(report.metrics, self._board.metric))
        self._say(f"trial {report.trial} step {report.step}: {metrics}")

    def exploited(self, exploit: Exploit) -> None:
        self._say(
            f"trial {exploit.trial} takes over trial {exploit.source} at step {exploit.source_step}, with "
            f"{_params(exploit.params)}"
        )

    def ended(self, result: TrialResult) -> None:
        more = f": {result.error}" if result.error else ""
        self._say(f"trial {result.id} {result.status} after {result.steps} steps, {result.seconds:.1f} s{more}")

    def note(self, text: str) -> None:
        """One line that stays, on a terminal as elsewhere."""
        self._console.print(Text(text))

    def refresh(self) -> None:
        now = time.monotonic()
        if self._live is not None and now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._live.refresh()

    def table(self) -> None:
        """All trials, for good."""
        self._console.print(results_table(self._board))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: str) -> None:
        if self._says:
            self._console.print(Text(text))
        self.refresh()

    def _draw(self) -> Group:
        trials = self._board.trials
        over = sum(trial.status in ("done", "stopped", "failed") for trial in trials)
        stopped = sum(trial.status == "stopped" for trial in trials)
        failed = sum(trial.status == "failed" for trial in trials)
        parts = [f"{over} of {self._total} trials", f"{self._slots} at a time"]
        parts += [f"{stopped} stopped early"] if stopped else []
        parts += [f"{failed} failed"] if failed else []
        head = Text(" · ".join([*parts, f"{time.monotonic() - self._began:.0f} s"]))
        return Group(head, results_table(self._board, most=min(_MOST_ROWS, max(4, self._console.height - 6))))


def results_table(board: Board, most: int | None = None) -> Table:
    """The trials as a table, the best marked. With `most`, those that run and the best of the others."""
    trials = board.trials
    best = board.best if board.metric else None
    shown = trials
    if most is not None and len(trials) > most:
        running = [trial for trial in trials if trial.status == "running"]
        others = sorted(
            (trial for trial in trials if trial.status != "running"), key=lambda trial: _order(board, trial)
        )
        shown = sorted([*running, *others[: max(0, most - len(running))]], key=lambda trial: trial.id)
    names = varied(trials)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("trial")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("status")
    table.add_column("step", justify="right")
    table.add_column(board.metric or "metric", justify="right")
    table.add_column("s", justify="right")
    table.add_column("")
    for trial in shown:
        value = board.value(trial) if board.metric else None
        is_best = best is not None and trial.id == best.id
        table.add_row(
            "*" if is_best else "",
            trial.id,
            *(short(trial.params.get(name)) for name in names),
            trial.status,
            str(trial.steps),
            "" if value is None else short(value),
            f"{trial.seconds:.1f}",
            _gist(trial.error) if trial.error else _lineage(trial),
            style="bold green" if is_best else _STYLES[trial.status],
        )
    return table


def _order(board: Board, trial: TrialResult) -> float:
    value = board.value(trial) if board.metric else None
    return float("inf") if value is None else value if board.mode == "min" else -value


def _gist(error: str) -> str:
    """The line that says what happened: what belongs to it is indented."""
    lines = [line for line in error.splitlines() if line and not line[0].isspace()]
    return (lines or [""])[-1][:80]


def _lineage(trial: TrialResult) -> str:
    return "from " + ", ".join(f"{take.source}@{take.source_step}" for take in trial.lineage) if trial.lineage else ""


def _params(params: object) -> str:
    assert hasattr(params, "items")
    return ", ".join(f"{name}={short(value)}" for name, value in params.items())


def _first(metrics: object, metric: str) -> list[tuple[str, float]]:
    """The metric that counts, then the others, a few in all."""
    assert hasattr(metrics, "items")
    return sorted(metrics.items(), key=lambda pair: pair[0] != metric)[:4]
