"""Deadline: ends the waits of a library that would wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sized

_EVERY_S = 1.0
_LOOKS = 8  # at least that many in the time that a wait has


class Deadline:
    """One thread looks at all waits; a wait costs no more than to say that it begins and ends.

    What counts is the time in which nothing comes while this process runs: a job that was suspended is not late.
    """

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self.seconds, self._end = seconds, end
        self.has_passed = False
        self._number = 0  # odd while a wait lasts
        self._missing: Sized = ()
        self._every_s = min(_EVERY_S, seconds / _LOOKS)
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def begin(self, missing: Sized) -> None:
        """A wait begins; what it waits for is taken out of `missing` as it comes."""
        self._missing = missing
        self._number += 1

    def end(self) -> None:
        self._number += 1

    def close(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        waited, before = 0.0, (0, 0)
        while not self._is_over.wait(self._every_s):
            now = self._number, len(self._missing)
            waited = waited + self._every_s if now == before and now[0] % 2 else 0.0
            before = now
            if waited >= self.seconds:
                self.has_passed = True
                self._end()
                return
