"""LogTail: the new complete lines of a growing log, up to the mark of the failure that the launcher reports."""

from __future__ import annotations

import os
import re

from distributed.core.env import FAILURE_MARK

_STOPS = (FAILURE_MARK, "Fatal Python error: ")  # the second is faulthandler's, after a crash in native code
_LONGEST = 1 << 16
_MOST_CHUNKS = 64  # per call: a rank that logs faster than this is read must not block its launcher
_CRASH_BYTES = 1 << 20
_UP = b"\x1b[A"
# A bar some lines below another one: as many new lines, the bar, and as many lines up.
_BAR_BELOW = re.compile(rb"(?<!\n)(\n++)([^\n]*?)((?:\x1b\[A)+)")


class LogTail:
    """Follows one file that another process appends to.

    A progress bar redraws its line with carriage returns; only its last state is returned, and `unfinished` has the
    one that it shows now. Bars below it are states of the same line.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._rest = b""
        self._stopped = False

    def lines(self, final: bool = False) -> list[str]:
        """The lines since the last call; with `final`, also a last line without a newline."""
        found: list[str] = []
        budget = _MOST_CHUNKS
        while not self._stopped and (final or budget) and (chunk := os.read(self._fd, _LONGEST)):
            budget -= 1
            text = self._rest + chunk
            *complete, self._rest = (_BAR_BELOW.sub(_in_one_line, text) if _UP in text else text).split(b"\n")
            self._take(complete, found)
            if len(self._rest) > _LONGEST:
                self._take([self._rest], found)
                self._rest = b""
        if final and self._rest and not self._stopped:
            self._take([self._rest], found)
            self._rest = b""
        return found

    @property
    def unfinished(self) -> str:
        """The last state of a line that has no end yet: a progress bar, or a question."""
        if self._stopped or b"\x1e" in self._rest:  # the mark of a failure, perhaps not whole
            return ""
        states = self._rest.decode("utf-8", "replace").split("\r")
        return next((state for state in reversed(states) if state.strip()), "")

    def _take(self, raw_lines: list[bytes], found: list[str]) -> None:
        for raw in raw_lines:
            if self._stopped:
                return
            text = raw.decode("utf-8", "replace")
            cuts = [at for at in (text.find(stop) for stop in _STOPS) if at >= 0]
            self._stopped = bool(cuts)
            text = text[: min(cuts)] if cuts else text
            *before, text = text.rstrip("\r").split("\r")
            is_removed_bar = bool(before) and not text.strip()
            if not is_removed_bar and (text or not cuts):
                found.append(text)

    def close(self) -> None:
        os.close(self._fd)


def _in_one_line(bar: re.Match[bytes]) -> bytes:
    """A bar below another one as a state of the line that the cursor goes back to."""
    ended, text, up = bar.groups()
    return ended[len(up) // len(_UP) :] + b"\r" + text + b"\r"


def crash_dump(path: str, most_lines: int = 80) -> str:
    """The stacks that faulthandler wrote when native code crashed; empty if it did not."""
    with open(path, "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _CRASH_BYTES))
        text = log.read().decode("utf-8", "replace")
    at = text.find(_STOPS[1])
    return "\n".join(text[at:].splitlines()[:most_lines]) if at >= 0 else ""
