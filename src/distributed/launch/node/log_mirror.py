"""LogMirror: shows the logs of this node's ranks on the screen, and refreshes the screen."""

from __future__ import annotations

import time
from typing import Protocol

from distributed.launch.node.log_tail import LogTail

_REFRESH_S = 0.1


class Screen(Protocol):
    """Shows a run to the user."""

    def rank_line(self, rank: int, text: str) -> None: ...

    def attempt_began(self, attempt: int) -> None: ...

    def refresh(self) -> None: ...


class LogMirror:
    """The ranks' logs on the screen."""

    def __init__(self, screen: Screen | None) -> None:
        self._screen = screen
        self._tails: dict[str, tuple[int, LogTail]] = {}
        self._refreshed_at = 0.0

    def follow(self, rank: int, log_path: str) -> None:
        if self._screen is not None:
            self._tails[log_path] = (rank, LogTail(log_path))

    def attempt_began(self, attempt: int) -> None:
        if self._screen is not None:
            self._screen.attempt_began(attempt)

    def drain(self, only: str | None = None, final: bool = False) -> None:
        for path, (rank, tail) in self._tails.items():
            if self._screen is not None and only in (None, path):
                for line in tail.lines(final):
                    self._screen.rank_line(rank, line)

    def refresh(self) -> None:
        if self._screen is not None and time.monotonic() >= self._refreshed_at + _REFRESH_S:
            self._refreshed_at = time.monotonic()
            self._screen.refresh()

    def finish(self, only: str | None = None) -> None:
        """Show the last log lines of all ranks, or of one; a rank's last lines come after its events."""
        if self._screen is not None:
            self._screen.refresh()
        self.drain(only, final=True)
        if self._screen is not None:
            self._screen.refresh()

    def close(self) -> None:
        for _, tail in self._tails.values():
            tail.close()
