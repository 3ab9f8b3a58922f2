"""A run shown while it trains: by the process that started its ranks, or by rank 0 where no launcher shows it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace

from distributed.core.events import Event, RankFailed, RunStarted
from distributed.observe.console import Console
from distributed.observe.follow import Follower

_TICK_S = 0.25


class RunScreen:
    """The screen of a run. Decisions that were printed before the run are not printed again."""

    def __init__(
        self, run_dir: str, attempt: int = 0, *, shows_progress: bool = True, printed: Iterable[str] = ()
    ) -> None:
        self._console = _OnceConsole(set(printed), shows_progress)
        self._follower = Follower(run_dir, self._console, attempt)

    def rank_line(self, rank: int, text: str) -> None:
        self._console.rank_line(rank, text)

    def unfinished_lines(self, lines: Mapping[int, str]) -> None:
        self._console.unfinished_lines(lines)

    def attempt_began(self, attempt: int) -> None:
        self._follower.start_attempt(attempt)

    def refresh(self) -> None:
        self._follower.refresh()

    def stopping(self, number: int) -> None:
        name = signal.Signals(number).name
        text = f"{name}: the ranks are asked to stop and save; Ctrl-C again ends them at once"
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Show what was written last and leave the terminal as it was."""
        self._follower.refresh()
        self._console.close()


class _OnceConsole(Console):
    def __init__(self, printed: set[str], enabled: bool) -> None:
        super().__init__(enabled=enabled)
        self._already = printed

    def on(self, event: Event) -> None:
        if isinstance(event, RankFailed):  # the error that is raised says it, at the end
            return
        if isinstance(event, RunStarted):
            event = replace(event, decisions=[text for text in event.decisions if text not in self._already])
        super().on(event)


class Ticker:
    """Refreshes a screen from a thread."""

    def __init__(self, screen: RunScreen) -> None:
        self._screen = screen
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(_TICK_S):
            self._screen.refresh()

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._screen.close()
