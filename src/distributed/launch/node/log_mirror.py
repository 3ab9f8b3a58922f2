"""LogMirror: shows the logs of this node's ranks on the screen, and refreshes the screen."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from distributed.launch.node.log_tail import LogTail

_REFRESH_S = 0.1
_TORCH_LINE = re.compile(r"\[rank\d+\]:\[[EWF]\d{4} [^]]* ProcessGroupNCCL\.cpp:\d+\]")
_TORCH_FRAME = re.compile(r"#\d+ .+ from .+:\d+$|frame #\d+: |Exception raised from |$")


def without_traces(lines: Iterable[str]) -> Iterator[str]:
    """Leave out what torch's threads write about the collectives of a world that was aborted on purpose.

    >>> first = "[rank2]:[E1118 11:27:36.57 ProcessGroupNCCL.cpp:750] [Rank 2] Stack trace of the failed collective:"
    >>> list(without_traces(["before", first, "#0 sum from session.py:5", "", "after", ""]))
    ['before', 'after', '']
    """
    in_trace = False
    for line in lines:
        in_trace = bool(_TORCH_LINE.match(line) or (in_trace and _TORCH_FRAME.match(line)))
        if not in_trace:
            yield line


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

    def drain(self, only: str | None = None, final: bool = False, hides_traces: bool = False) -> None:
        """Show the new lines; `hides_traces`: survivors of an abort are among the ranks, and leave torch's traces."""
        for path, (rank, tail) in self._tails.items():
            if self._screen is not None and only in (None, path):
                lines = tail.lines(final)
                for line in without_traces(lines) if hides_traces else lines:
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
