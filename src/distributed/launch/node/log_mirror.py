"""Echo: what the ranks of this node print, on the screen, and the screen's own refreshes."""

from __future__ import annotations

import time
from typing import Protocol

from distributed.launch.logtail import LogTail

_REFRESH_S = 0.1


class Screen(Protocol):
    """Whatever shows a run to the user."""

    def rank_line(self, rank: int, text: str) -> None: ...

    def attempt_began(self, attempt: int) -> None: ...

    def refresh(self) -> None: ...


class Echo:
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
        """Show the rest, of all ranks or of the one that matters; what a rank said last came after its events."""
        if self._screen is not None:
            self._screen.refresh()
        self.drain(only, final=True)
        if self._screen is not None:
            self._screen.refresh()

    def close(self) -> None:
        for _, tail in self._tails.values():
            tail.close()
