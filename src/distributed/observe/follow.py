"""Follow a run from outside: its new events and the step it is at, so that one process shows N ranks as one run."""

from __future__ import annotations

import os
from pathlib import Path

from distributed.core.events import Event, Observer, parse_event
from distributed.core.heartbeat import heartbeat_path, read_beat
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
        self._events = self.run_dir / "events.jsonl"
        self._offset = self._events.stat().st_size if from_end and self._events.exists() else 0
        self.start_attempt(attempt)

    def start_attempt(self, attempt: int) -> None:
        self._beats = heartbeat_path(self.run_dir / "attempts" / str(attempt), 0)
        self._stale_beat = read_beat(self._beats)  # a resumed run's directory may hold the beats of its past

    def refresh(self) -> None:
        """Pass on the complete lines that are new, and the step that rank 0 has done."""
        for line in self._new_lines():
            event = _parse(line)
            if event is not None:
                self._observer.on(event)
        if isinstance(self._observer, Console):
            beat = read_beat(self._beats)
            self._observer.progress(beat.step if beat is not None and beat != self._stale_beat else None)

    def _new_lines(self) -> list[bytes]:
        try:
            with self._events.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()


def _parse(line: bytes) -> Event | None:
    """The event of a line, or None for one that is torn or of another version: following must not end the run."""
    try:
        return parse_event(line.decode())
    except (ValueError, TypeError, AttributeError):
        return None
