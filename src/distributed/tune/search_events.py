"""SearchEvents: where everything that happens in a search arrives, for the journal, the checks and the screen."""

from __future__ import annotations

from distributed.core.errors import TaskError
from distributed.core.registry import nearest_hint
from distributed.tune.journal import Journal
from distributed.tune.results.reading import ReadCheck
from distributed.tune.results.results import Board
from distributed.tune.results.screen import Screen
from distributed.tune.runner import Exploit, Report, TrialResult, TrialSpec


class SearchEvents:
    """The Watcher that a tuner gives to its runner."""

    def __init__(self, journal: Journal, board: Board, reading: ReadCheck, screen: Screen) -> None:
        self._journal, self._board, self._reading, self._screen = journal, board, reading, screen

    def started(self, trial: TrialSpec) -> None:
        self._journal.started(trial)
        self._board.started(trial)
        self._screen.started(trial)

    def reported(self, report: Report) -> None:
        self._journal.reported(report)
        self._board.reported(report)
        self._screen.reported(report)

    def read(self, trial: str, names: frozenset[str]) -> None:
        self._journal.read(names)
        self._reading.read(names)

    def exploited(self, exploit: Exploit) -> None:
        self._journal.exploited(exploit)
        self._board.exploited(exploit)
        self._screen.exploited(exploit)

    def ended(self, result: TrialResult) -> None:
        self._journal.ended(result)
        self._board.ended(result)
        self._screen.ended(result)
        if result.status == "done":
            self._reading.trial_finished()
            self._board.settle_metric()
            self._check_metric(result)

    def refresh(self) -> None:
        self._screen.refresh()

    def _check_metric(self, result: TrialResult) -> None:
        metric = self._board.metric
        names = {name for report in result.history for name in report.metrics} | set(result.metrics)
        if metric and metric not in names:
            raise TaskError(
                f"trial {result.id} ended without having reported {metric!r}",
                why=f"the trial reported {', '.join(sorted(names)) or 'nothing'}",
                do=nearest_hint(metric, names)
                if names
                else f"tune.report({{{metric!r}: …}}), or return it from train_fn",
            )
