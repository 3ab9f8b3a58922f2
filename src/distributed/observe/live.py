"""A run shown while it goes on: by the process that started its ranks, or by rank 0 where nobody else watches."""

from __future__ import annotations

import threading

from distributed.observe.console import Console
from distributed.observe.follow import Follower

_TICK_S = 0.25


class RunScreen:
    """The console of a run that is followed through its directory; launchers pass it the ranks' lines."""

    def __init__(self, run_dir: str, attempt: int = 0, *, shows_progress: bool = True) -> None:
        self._console = Console(enabled=shows_progress)
        self._follower = Follower(run_dir, self._console, attempt)

    def rank_line(self, rank: int, text: str) -> None:
        self._console.rank_line(rank, text)

    def refresh(self) -> None:
        self._follower.refresh()

    def close(self) -> None:
        """Show what was written last and leave the terminal as it was."""
        self._follower.refresh()
        self._console.close()


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
