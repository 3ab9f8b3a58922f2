"""LogTail: the new complete lines of a growing log, up to the mark of the failure that the launcher reports."""

from __future__ import annotations

import os

from distributed.core.env import FAILURE_MARK

_STOPS = (FAILURE_MARK, "Fatal Python error: ")  # the second is faulthandler's, after a crash in native code
_LONGEST = 1 << 16
_MOST_CHUNKS = 64  # per call: a rank that logs faster than this is read must not block its launcher
_CRASH_BYTES = 1 << 20


class LogTail:
    """Follows one file that another process appends to.

    A progress bar redraws its line with carriage returns; only its last state is returned.
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
            *complete, self._rest = (self._rest + chunk).split(b"\n")
            self._take(complete, found)
            if len(self._rest) > _LONGEST:
                self._take([self._rest], found)
                self._rest = b""
        if final and self._rest and not self._stopped:
            self._take([self._rest], found)
            self._rest = b""
        return found

    def _take(self, raw_lines: list[bytes], found: list[str]) -> None:
        for raw in raw_lines:
            if self._stopped:
                return
            text = raw.decode("utf-8", "replace")
            cuts = [at for at in (text.find(stop) for stop in _STOPS) if at >= 0]
            self._stopped = bool(cuts)
            text = text[: min(cuts)] if cuts else text
            text = text.rstrip("\r").rpartition("\r")[2]
            if text or not cuts:
                found.append(text)

    def close(self) -> None:
        os.close(self._fd)


def crash_dump(path: str, most_lines: int = 80) -> str:
    """The stacks that faulthandler wrote when native code crashed; empty if it did not."""
    with open(path, "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _CRASH_BYTES))
        text = log.read().decode("utf-8", "replace")
    at = text.find(_STOPS[1])
    return "\n".join(text[at:].splitlines()[:most_lines]) if at >= 0 else ""
