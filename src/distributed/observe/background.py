"""Run a slow observer beside the training: a server that hangs or fails costs the run a warning, not its life."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable

from distributed.core.events import Event, Observer, RunEnded

QUEUE_EVENTS = 10_000
QUEUE_TIMEOUT_S = 5.0  # how long a full queue may hold up the run, once
DRAIN_S = 120.0  # for the last events and the model's upload
QUIET_DRAIN_S = 10.0  # wait that long before saying what is waited for


class Background:
    """Feeds an observer from a thread of its own.

    Every event is delivered in order, unless the observer is stuck: then the run waits `queue_timeout_s` once and
    continues, and reports the lost events. RunEnded is never given up before `drain_s`. An observer that raises is
    named on stderr, once, and gets no more events.
    """

    def __init__(
        self,
        observer: Observer,
        *,
        size: int = QUEUE_EVENTS,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        drain_s: float = DRAIN_S,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._observer = observer
        self._queue_timeout_s = queue_timeout_s
        self._drain_s = drain_s
        self._warn = warn or warn_on_stderr
        self._queue: queue.Queue[Event | None] = queue.Queue(size)
        self._failed = threading.Event()
        self._stuck = False
        self._lost = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"observe-{name_of(observer)}", daemon=True)
        self._thread.start()

    def on(self, event: Event) -> None:
        if not self._failed.is_set() and not self._closed:
            self._put(event, self._drain_s if isinstance(event, RunEnded) else self._queue_timeout_s)

    def close(self) -> None:
        """Wait for what is queued, at most `drain_s`, and report what was lost."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + self._drain_s
        if not self._failed.is_set():
            self._put(None, self._drain_s)
            self._thread.join(min(QUIET_DRAIN_S, self._drain_s))
            if self._thread.is_alive() and self._drain_s > QUIET_DRAIN_S:
                self._warn(
                    f"waiting for {name_of(self._observer)} to take the last events, at most {self._drain_s:.0f} s"
                )
                self._thread.join(max(0.0, deadline - time.monotonic()))
        lost = self._lost + (self._queue.qsize() if self._thread.is_alive() else 0)
        if not self._failed.is_set() and (lost or self._thread.is_alive()):
            self._warn(
                f"{name_of(self._observer)} did not take all events in time: {lost or 'the last'} lost there; "
                "events.jsonl in the run directory has them all"
            )

    def _put(self, event: Event | None, timeout_s: float) -> None:
        """Queue an event. Waits in short turns, since an observer that fails meanwhile empties no queue."""
        deadline = time.monotonic() + (0.0 if self._stuck and not isinstance(event, RunEnded | None) else timeout_s)
        while not self._failed.is_set():
            try:
                self._queue.put(event, timeout=min(0.1, max(0.001, deadline - time.monotonic())))
                self._stuck = False
                return
            except queue.Full:
                if time.monotonic() >= deadline:
                    break
        if event is not None and not self._failed.is_set():
            self._lost += 1
            if not self._stuck:
                self._warn(f"{name_of(self._observer)} is stuck; the run continues without waiting for it")
            self._stuck = True

    def _run(self) -> None:
        try:
            while (event := self._queue.get()) is not None:
                self._observer.on(event)
            self._observer.close()
        except Exception as error:  # noqa: BLE001 - an observer that fails is dropped, and never ends a run
            self._failed.set()
            self._warn(failure_text(self._observer, error))


def name_of(observer: Observer) -> str:
    return type(observer).__name__


def failure_text(observer: Observer, error: Exception) -> str:
    return f"{name_of(observer)} failed and is left out from here on: {type(error).__name__}: {error}"


def warn_on_stderr(message: str) -> None:
    print(f"distributed: {message}", file=sys.stderr, flush=True)
