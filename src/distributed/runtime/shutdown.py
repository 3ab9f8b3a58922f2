"""An orderly end on a signal: all ranks agree on a step, finish it and stop, so that nothing trained is lost.

After a signal each rank says so in the store and goes on training; once all have, rank 0 names a step two ahead. No
rank waits for another, because one that waits outside a collective would hang one that waits inside.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AHEAD = 2  # ranks that synchronize after every step are at most one step apart


class StopRequest:
    """Whether somebody asked this run to stop, and at which step it will."""

    def __init__(self, rank: int = 0, world_size: int = 1, store: dist.Store | None = None) -> None:
        self._rank, self._world_size, self._store = rank, world_size, store
        self._stop_at: int | None = None
        self._told = False
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, self._previous[self.received])  # a second one does what it always did

    @property
    def is_agreed(self) -> bool:
        """Whether the run ends before its time, the same on every rank."""
        return self._stop_at is not None

    def hear(self) -> None:
        """A signal may have reached another rank only; asked now and then, since it costs a message."""
        if (
            self.received is None
            and self._store is not None
            and self._world_size > 1
            and self._store.check(["stop/asked"])
        ):
            self.received = signal.SIGTERM

    def due(self, step: int) -> bool:
        """Whether the run ends here, after `step` steps. Costs a look at an attribute until a signal came."""
        if self.received is None:
            return False
        if self._store is None or self._world_size == 1:
            self._stop_at = step
            return True
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else the hosts may be many steps apart
        if not self._told:
            self._store.set(f"stop/{self._rank}", "asked")
            self._store.set("stop/asked", "asked")
            self._told = True
        if (
            self._stop_at is None
            and self._rank == 0
            and self._store.check([f"stop/{r}" for r in range(self._world_size)])
        ):
            self._store.set("stop/at", str(step + _AHEAD))
        if self._stop_at is None and self._store.check(["stop/at"]):
            self._stop_at = int(self._store.get("stop/at"))
        return self._stop_at is not None and step >= self._stop_at
