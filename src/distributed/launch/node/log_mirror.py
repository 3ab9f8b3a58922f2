"""LogMirror: shows the logs of this node's ranks on the screen, and refreshes the screen."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Protocol

from distributed.launch.node.log_tail import LogTail

_REFRESH_S = 0.1
_TORCH_LINE = re.compile(r"\[rank\d+\]:\[[EWF]\d{4} [^]]* ProcessGroupNCCL\.cpp:\d+\]")
_MORE_OF_IT = re.compile(r"#\d+ .+ from .+:\d+$|frame #\d+: |Exception raised from |nccl\w+Error: |Last error:|$")


class TorchTraces:
    """What torch's threads write about collectives that a rank outlives: its peer was lost, or they were aborted.

    >>> traces, first = TorchTraces(), "[rank2]:[E1118 11:27:36.57 ProcessGroupNCCL.cpp:750] [Rank 2] NCCL error:"
    >>> lines = ["before", first, "ncclRemoteError: x", "Last error:", "it closed", "#0 f from x.py:5", "", "after", ""]
    >>> [line for line in lines if not traces.hides(line)]
    ['before', 'after', '']
    """

    def __init__(self) -> None:
        self._is_inside = self._is_next = False

    def hides(self, line: str) -> bool:
        """Whether a line is part of such a message; called with every line."""
        is_more = self._is_inside and (self._is_next or _MORE_OF_IT.match(line) is not None)
        self._is_next = is_more and line == "Last error:"
        self._is_inside = is_more or _TORCH_LINE.match(line) is not None
        return self._is_inside


class MirrorScreen(Protocol):
    """Shows a run to the user."""

    def rank_line(self, rank: int, text: str) -> None: ...

    def unfinished_lines(self, lines: Mapping[int, str]) -> None:
        """What ranks have written that may still change, such as their progress bars; without those that have none."""

    def attempt_began(self, attempt: int) -> None: ...

    def refresh(self) -> None: ...


class LogMirror:
    """The ranks' logs on the screen."""

    def __init__(self, screen: MirrorScreen | None) -> None:
        self._screen = screen
        self._tails: dict[str, tuple[int, LogTail, TorchTraces]] = {}
        self._refreshed_at = 0.0
        self._unfinished: dict[int, str] = {}

    def follow(self, rank: int, log_path: str) -> None:
        if self._screen is not None:
            self._tails[log_path] = (rank, LogTail(log_path), TorchTraces())

    def attempt_began(self, attempt: int) -> None:
        if self._screen is not None:
            self._screen.attempt_began(attempt)

    def drain(self, only: str | None = None, final: bool = False, hides_traces: bool = False) -> None:
        """Show the new lines; `hides_traces`: leave out torch's about collectives that the ranks outlive."""
        if self._screen is None:
            return
        found = [
            (rank, line)
            for path, (rank, tail, traces) in self._tails.items()
            if only in (None, path)
            for line in tail.lines(final)
            if not (hides_traces and traces.hides(line))
        ]
        self._show_unfinished(self._screen)  # first: a bar that has ended is not shown again below its last line
        for rank, line in found:
            self._screen.rank_line(rank, line)

    def _show_unfinished(self, screen: MirrorScreen) -> None:
        lines = {rank: text for rank, tail, _ in self._tails.values() if (text := tail.unfinished)}
        if lines != self._unfinished:
            self._unfinished = lines
            screen.unfinished_lines(lines)

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
        for _, tail, _ in self._tails.values():
            tail.close()
