"""What runs in an actor of Ray Tune: a node's place for trials, each in a process of its own, as on one machine.

A trial is not run in the actor itself: so its training has a main thread and signals, can start ranks, and ends with
all that it started. The actor outlives it, and the next trial is forked from a process that has torch already.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ray import tune

from distributed.core.choices import Device
from distributed.core.errors import LaunchError
from distributed.launch.node.processes import RankProcess
from distributed.observe.trial import TrialNote
from distributed.tune.search_dir import SearchDir
from distributed.tune.trials.line import LineServer, Message
from distributed.tune.trials.placement import Placement
from distributed.tune.trials.processes import TrialProcesses
from distributed.tune.trials.records import Trial

GONE = "gone"  # the message with which a trial's process is over
_LOOK_S = 0.25
_BEAT_S = 1.0
_GRACE_S = 60.0  # for a trial that was asked to end: a step of the Trainer and a save
_KILL_S = 5.0  # then, from SIGTERM to SIGKILL


@dataclass(frozen=True)
class ActorSettings:
    """What every actor of a search is given: plain values."""

    run_dir: str
    function: str  # the folder of train_fn
    ticket: str  # by which a trial knows that file
    cwd: str  # the driver's
    modules: tuple[str, ...]  # to import before trials are forked
    device: Device
    devices: int  # of a trial

    def placement(self) -> Placement:
        """Ray has placed the actor and set its devices: here it has one slot."""
        return Placement(1, self.device, 1, self.devices, 1)

    def check(self) -> None:
        missing = [path for path in (self.run_dir, self.function, self.cwd) if not os.path.isdir(path)]
        if missing:
            raise LaunchError(
                f"node {socket.gethostname()} does not see {' and '.join(missing)}",
                why="the trials read and write the same files as the process that searches",
                do="keep them on storage that all nodes mount at the same path: set run_dir, start from a folder there",
            )


@dataclass
class _Going:
    """The trial that runs."""

    number: int  # of its starts
    asked_to_leave: threading.Event = field(default_factory=threading.Event)
    is_held: bool = False  # it waits at a report
    end_by: float | None = None  # after which it is made to end


class PlacedTrial(tune.Trainable):  # type: ignore[misc]
    """A step of it is a trial's messages up to its next report, or to its end; or nothing, for a second."""

    def setup(self, config: dict[str, Any]) -> None:
        host = ActorSettings(**config["host"])
        host.check()
        self._place = _Place(host)
        self._has_begun = False

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._place.finish()
        self._has_begun = False
        return True

    def step(self) -> dict[str, Any]:
        if not self._has_begun:  # not before: Ray may give the trial to another actor that is free sooner
            self._has_begun = True
            self._place.begin(self.config)
        return {
            "messages": json.dumps(self._place.next())
        }  # no metrics: some names, like "done", mean something to Ray

    def leave(self) -> None:
        """The trial that waits at a report goes no further."""
        self._place.leave()

    def cleanup(self) -> None:
        self._place.close()


class _Place:
    """Starts processes and holds each at its reports. One thread waits for them and answers."""

    def __init__(self, host: ActorSettings) -> None:
        self._host = host
        self._orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._messages: queue.Queue[list[Message] | BaseException] = queue.Queue()
        self._verdicts: queue.Queue[bool] = queue.Queue()
        self._batch: list[Message] = []
        self._going: _Going | None = None
        self._thread = threading.Thread(target=self._serve, name="trials", daemon=True)
        self._thread.start()

    def begin(self, config: dict[str, Any]) -> None:
        os.chdir(self._host.cwd)  # Ray has a folder of its own for each trial
        self._going = _Going(config["note"]["attempt"])
        self._orders.put(config)

    def next(self) -> list[Message]:
        """The messages up to the next report, at which the trial is held until this is called again, or to its end.

        None, where none comes for a while: an actor that waits does not notice a request to stop.
        """
        assert self._going is not None
        if self._going.is_held:
            self._going.is_held = False
            self._verdicts.put(not self._going.asked_to_leave.is_set())
        try:
            messages = self._messages.get(timeout=_BEAT_S)
        except queue.Empty:
            return []
        if isinstance(messages, BaseException):
            self._going = None  # the thread that could end it has failed
            raise messages
        if messages[-1]["kind"] == GONE:
            self._going = None
        else:
            self._going.is_held = True
        for message in messages:
            message["age_s"] = time.monotonic() - message.pop("at")
        return messages

    def leave(self) -> None:
        if self._going is not None:
            self._going.asked_to_leave.set()

    def finish(self) -> None:
        """End the trial that still runs, in order."""
        while self._going is not None:
            self.leave()
            self.next()

    def close(self) -> None:
        self.finish()
        self._orders.put(None)
        self._thread.join()

    def _serve(self) -> None:
        """The thread that makes the trial processes lives as long as they do."""
        try:
            line = LineServer(self._answer)
            log_path = str(SearchDir(self._host.run_dir).actor_log(socket.gethostname(), os.getpid()))
            trial_processes = TrialProcesses(
                self._host.placement(), self._host.function, self._host.ticket, log_path, self._host.modules
            )
            try:
                while (config := self._orders.get()) is not None:
                    self._run(config, line, trial_processes)
            finally:
                trial_processes.close()
                line.close()
        except BaseException as failed:  # noqa: BLE001 - the boundary of a thread: raised in the actor's own
            self._messages.put(failed)

    def _run(self, config: dict[str, Any], line: LineServer, trial_processes: TrialProcesses) -> None:
        going = self._going
        assert going is not None
        note = TrialNote(**{**config["note"], "line": line.path})
        trial = Trial(config["index"], note.id, note.params, note.directory, starts=note.attempt)
        process = trial_processes.start(trial, note.write(), 0)
        with selectors.DefaultSelector() as selector:
            selector.register(line, selectors.EVENT_READ)
            if trial_processes.can_be_waited_for:
                selector.register(trial_processes, selectors.EVENT_READ)
            while (code := process.poll()) is None:
                selector.select(trial_processes.look_every_s(_LOOK_S))
                line.pump()
                if going.asked_to_leave.is_set():
                    self._press(going, process)
        line.pump()  # its last words came before its end
        process.end(signal.SIGKILL)  # what it left running
        self._send({"kind": GONE, "trial": note.id, "attempt": note.attempt, "code": code}, is_last=True)

    def _press(self, going: _Going, process: RankProcess) -> None:
        """One that had its answer at `tune.report` is on its way out. The Trainer takes a signal, and saves."""
        now = time.monotonic()
        if going.end_by is None:
            going.end_by = now + _GRACE_S
            process.signal(signal.SIGTERM)
        elif now >= going.end_by:
            process.end(signal.SIGKILL if process.ended_by_us else signal.SIGTERM)
            going.end_by = now + _KILL_S

    def _answer(self, message: Message) -> Message:
        going = self._going
        if going is None or message["attempt"] != going.number:
            return {"go": False}
        if message["kind"] != "report":
            self._send(message)
        elif going.asked_to_leave.is_set():
            return {"go": False}
        else:
            self._send(message, is_last=True)
            continues = self._verdicts.get()
            if not continues and message["by"] == "report":
                going.end_by = time.monotonic() + _GRACE_S
            return {"go": continues}
        return {"go": not going.asked_to_leave.is_set()}

    def _send(self, message: Message, is_last: bool = False) -> None:
        self._batch.append({**message, "at": time.monotonic()})
        if is_last:
            self._messages.put(self._batch)
            self._batch = []
