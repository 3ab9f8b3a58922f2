"""Stop signals: Ctrl-C, SIGTERM and the like become a number that the launcher reads while its ranks run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Stopped(KeyboardInterrupt):
    """The run was stopped by a signal and all of its ranks have ended; their checkpoints are kept."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number
        self.exit_code = 128 + number


# The signal that the ranks get; for a closed terminal (SIGHUP) it is SIGTERM.
_FORWARDED_AS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,  # sent by Slurm, if so configured, some time before it reclaims the node
}


class Stops:
    """Counts stop signals and restores the previous handlers; does nothing outside the main thread."""

    def __init__(self, on_stop: Callable[[int], None] | None = None) -> None:
        self.count = 0
        self._on_stop = on_stop
        self.number: int | None = None  # the signal of the first request, as it is sent to the ranks
        self._before: dict[int, Any] = {}

    def request(self, number: int) -> None:
        self.number = number if self.number is None else self.number
        self.count += 1

    def announce(self) -> None:
        if self._on_stop is not None and self.number is not None:
            self._on_stop(self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(_FORWARDED_AS[signal.Signals(number)])

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            for number in _FORWARDED_AS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN and before is not None:  # nohup keeps SIGHUP ignored
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
