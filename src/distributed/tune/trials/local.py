"""LocalRunner: the trials as processes of this machine, forked from one process that has its imports behind it.

One thread waits for everything at once: the messages of trials, and the ends of their processes. So a trial
starts the moment that another one ends.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from distributed.core.errors import Problem
from distributed.core.plan import Decision
from distributed.launch.node.processes import RankProcess
from distributed.launch.node.stop_signals import Stopped
from distributed.planner.hardware import probe_hardware
from distributed.tune.runner import TuneRequest, Watcher
from distributed.tune.search_dir import SearchDir
from distributed.tune.trials.lifecycle import TrialLifecycle, ending
from distributed.tune.trials.line import LineServer, Message
from distributed.tune.trials.placement import decisions, obstacles, place
from distributed.tune.trials.processes import TrialProcesses, modules_for
from distributed.tune.trials.trial import write_function

_REFRESH_S = 0.25
_GRACE_S = 60.0  # for a trial that was asked to end: a step of the Trainer and a save
_KILL_S = 5.0  # then, from SIGTERM to SIGKILL
_LOOK_S = 0.02


class LocalRunner:
    """Trials on this machine, without Ray."""

    name = "local"

    def obstacles(self, request: TuneRequest) -> list[Problem]:
        return obstacles(request, probe_hardware())

    def decisions(self, request: TuneRequest) -> list[Decision]:
        return decisions(request, probe_hardware())

    def slots(self, request: TuneRequest) -> int:
        return place(request, probe_hardware()).slots

    def run(self, request: TuneRequest, watcher: Watcher) -> None:
        _Tune(request, watcher).run()

    def close(self) -> None:
        """`run` leaves nothing open."""


@dataclass
class _Process:
    """What runs a leg of a trial."""

    process: RankProcess
    slot: int
    end_by: float = float("inf")  # after which it is made to end


class _Tune:
    def __init__(self, request: TuneRequest, watcher: Watcher) -> None:
        self._watcher, self._lifecycle = watcher, TrialLifecycle(request, watcher)
        placement = place(request, probe_hardware())
        self._free = list(range(placement.slots))
        folder = SearchDir(request.run_dir).function
        ticket = write_function(request.train_fn, folder)
        self._line = LineServer(self._answer)
        log_path = str(SearchDir(request.run_dir).parent_log)
        self._trial_processes = TrialProcesses(
            placement, str(folder), ticket.to_text(), log_path, modules_for(request.train_fn)
        )
        self._processes: dict[str, _Process] = {}
        self._leftovers: list[_Process] = []  # of trials that ended: what they started and did not end themselves
        self._is_closing = False

    def run(self) -> None:
        try:
            with _terminations():
                self._fill()
                while not self._lifecycle.is_over:
                    self._wait()
                    self._fill()
        except BaseException:
            self._abandon()
            raise
        finally:
            try:
                self._clear()
            finally:
                self._trial_processes.close()
                self._line.close()

    def _fill(self) -> None:
        while self._free and (trial := self._lifecycle.next()) is not None:
            note_path = self._lifecycle.note(trial, self._line.path).write()
            self._lifecycle.started(trial)
            slot = self._free.pop(0)
            self._processes[trial.id] = _Process(self._trial_processes.start(trial, note_path, slot), slot)

    def _wait(self) -> None:
        """Until something happens, or it is time to look."""
        now = time.monotonic()
        entries = [*self._processes.values(), *self._leftovers]
        until = min([entry.end_by - now for entry in entries], default=_REFRESH_S)
        with selectors.DefaultSelector() as selector:
            selector.register(self._line, selectors.EVENT_READ)
            if self._trial_processes.can_be_waited_for:
                selector.register(self._trial_processes, selectors.EVENT_READ)
            ready = selector.select(max(0.0, min(until, self._trial_processes.look_every_s(_REFRESH_S))))
        self._line.pump()
        self._reap()
        self._press()
        if not ready:
            self._watcher.refresh()

    def _reap(self) -> None:
        for name, entry in list(self._processes.items()):
            code = entry.process.poll()
            if code is not None:
                self._line.pump()  # its last words came before its end
                del self._processes[name]
                if not entry.process.is_gone():  # SIGTERM was sent by now
                    self._leftovers.append(_Process(entry.process, entry.slot, time.monotonic() + _KILL_S))
                self._free.append(entry.slot)
                self._lifecycle.end(self._lifecycle.legs[name].trial, ending(code))

    def _press(self) -> None:
        """End those that did not as they were asked."""
        now = time.monotonic()
        for entry in self._processes.values():
            if now >= entry.end_by:
                entry.process.end(signal.SIGKILL if entry.process.ended_by_us else signal.SIGTERM)
                entry.end_by = now + _KILL_S
        for left in self._leftovers:
            if now >= left.end_by:
                left.process.end(signal.SIGKILL)
                left.end_by = now + _KILL_S
        self._leftovers = [left for left in self._leftovers if not left.process.is_gone()]

    def _clear(self) -> None:
        """Wait for what is left of trials that ended, and end it."""
        while self._leftovers:
            self._press()
            time.sleep(_LOOK_S)

    def _answer(self, message: Message) -> Message:
        if self._is_closing:  # a Trainer that was asked to end returns as one does that is done: it is not
            if message["kind"] == "saved":
                self._lifecycle.hear(message)
            return {"go": False}
        continues = self._lifecycle.hear(message)
        entry = self._processes.get(message["trial"])
        if not continues and entry is not None and message["kind"] == "report" and entry.end_by == float("inf"):
            # `tune.report` takes the answer; the Trainer a signal, after which it stops at the next step and saves
            entry.end_by = time.monotonic() + _GRACE_S
            if message["by"] == "trainer":
                entry.process.signal(signal.SIGTERM)
        return {"go": continues}

    def _abandon(self) -> None:
        """Something ended the search: so do all trials, which may save first; a second Ctrl-C ends them at once."""
        self._is_closing = True
        for entry in self._processes.values():
            entry.process.signal(signal.SIGTERM)
            entry.end_by = time.monotonic() + _GRACE_S
        try:
            while any(entry.process.poll() is None for entry in self._processes.values()):
                self._line.pump(0.05)
                self._press()
        except KeyboardInterrupt:
            pass
        for entry in self._processes.values():
            entry.process.end(signal.SIGKILL)
        self._lifecycle.interrupt()


@contextlib.contextmanager
def _terminations() -> Iterator[None]:
    """SIGTERM ends a search as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
