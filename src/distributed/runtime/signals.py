"""Signals that request a stop of a rank: the first is noted, and training continues to a step that can be saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_TWICE_S = 2.0


class StopSignals:
    """While it is entered, notes the first signal in `received`; a second one does what it always did."""

    def __init__(self, *, is_supervised: bool = False) -> None:
        self._is_supervised = is_supervised
        self._received_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def request(self, number: int) -> None:
        """What a signal does, for a rank whose process is another's, which hears signals in its place; from any
        thread."""
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """A second one does what it always did. A launcher passes on what it gets, and what is sent to all processes
        of a job comes twice then: that is one."""
        now = time.monotonic()
        if self.received is not None and self._is_supervised and now - self._received_at < _TWICE_S:
            return
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            if self._is_supervised:
                return
        signal.signal(number, self._previous[signal.Signals(number)])
        if self._is_supervised:
            os.kill(os.getpid(), number)
