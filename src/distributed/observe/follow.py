"""Follow a run from outside: its new events and the step it is at, so that one process shows N ranks as one run."""

from __future__ import annotations

import os
from pathlib import Path

from distributed.core.events import EventTail, Observer
from distributed.core.protocol.heartbeat import read_beat
from distributed.core.run_dir import RunDir
from distributed.observe.console import Console


class Follower:
    """Passes what a run writes to an observer, each time `refresh` is called.

    Make it before the ranks start, and call `start_attempt` before they are started again.
    `from_end=False` also passes on the events that the file already held.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], observer: Observer, attempt: int = 0, *, from_end: bool = True
    ) -> None:
        self.run_dir = Path(run_dir)
        self._observer = observer
        self._events = EventTail(RunDir(run_dir).events, from_end=from_end)
        self.start_attempt(attempt)

    def start_attempt(self, attempt: int) -> None:
        self._beats = RunDir(self.run_dir).attempt(attempt).heartbeat(0)
        self._stale_beat = read_beat(self._beats)  # a resumed run's directory may hold the beats of its past

    def refresh(self) -> None:
        """Pass on the complete lines that are new, and the step that rank 0 has done."""
        for event in self._events.read():
            self._observer.on(event)
        if isinstance(self._observer, Console):
            beat = read_beat(self._beats)
            self._observer.progress(beat.step if beat is not None and beat != self._stale_beat else None)
