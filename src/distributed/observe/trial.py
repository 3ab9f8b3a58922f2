"""What a process of a trial knows of its search, and the socket on which it reports.

A trial is one training among many; its runner names, in an environment variable, a file that says all of this. So the
trial's own process and every rank that it starts find the same. On the Unix socket, each message is a line of JSON and
is answered by one.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from distributed.core.atomic import write_private
from distributed.core.env import trial_in_env
from distributed.core.events import CheckpointSaved, EpochEnded, Event, RunStarted
from distributed.core.run_dir import CHECKPOINTS, RunDir


@dataclass(frozen=True)
class TrialDir:
    """The folder of one trial, and every name in it."""

    path: str

    @property
    def note(self) -> Path:
        """What its processes know of the search."""
        return Path(self.path, "trial.json")

    @property
    def checkpoints(self) -> Path:
        """Those that it reported, by step."""
        return Path(self.path, CHECKPOINTS)

    @property
    def arriving(self) -> Path:
        """What it takes over from another trial, until all of it is there."""
        return Path(self.path, ".taken")

    def run(self, takeovers: int = 0) -> RunDir:
        """Where its Trainer writes: another folder each time that it took over another trial.

        >>> TrialDir("trials/0001").run(2).path.as_posix()
        'trials/0001/run-2'
        """
        return RunDir(Path(self.path, f"run-{takeovers}" if takeovers else "run"))


@dataclass(frozen=True)
class TrialNote:
    """Which trial this is, and where it resumes."""

    id: str
    params: dict[str, Any]
    directory: str
    line: str  # the path of the socket
    run: str = "run"  # the folder in it where the Trainer writes
    step: int = 0  # reports that the checkpoint below has behind it
    checkpoint: str = ""  # the folder that `tune.checkpoint()` reads
    attempt: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # that the Trainer takes besides

    def write(self) -> str:
        """Into the trial's folder; the path, for the environment."""
        path = TrialDir(self.directory).note
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, json.dumps(asdict(self), indent=1) + "\n")
        return str(path)


@cache
def _read(path: str, pid: int) -> TrialNote:
    return TrialNote(**json.loads(Path(path).read_text(encoding="utf-8")))


def current_trial() -> TrialNote | None:
    """The trial that this process belongs to."""
    path = trial_in_env()
    return _read(path, os.getpid()) if path else None


class TrialLine:
    """This process's end of the socket. Any thread may send; each waits for its answer."""

    def __init__(self, note: TrialNote) -> None:
        self._note = note
        self._lock = threading.Lock()
        self._pid = 0
        self._socket: socket.socket | None = None
        self._file: Any = None

    def tell(self, kind: str, **content: Any) -> dict[str, Any]:
        """Send, and wait for the answer. ConnectionError when the search has ended."""
        message = {"kind": kind, "trial": self._note.id, "attempt": self._note.attempt, "pid": os.getpid(), **content}
        with self._lock:
            if self._pid != os.getpid():  # at first, and in a fork, whose answers would go to its parent
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect(self._note.line)
                self._file = self._socket.makefile("rb")
                self._pid = os.getpid()
            assert self._socket is not None
            try:
                self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
                answer = self._file.readline()
            except BaseException:  # a signal came between: half a message may be out, or an answer on its way
                self._pid = 0
                self._file.close()
                self._socket.close()
                raise
        if not answer:
            raise ConnectionError("the process of the search that started this trial has ended")
        return dict(json.loads(answer))


@cache
def trial_line(note_path: str) -> TrialLine:
    """One line a process, for everybody in it."""
    return TrialLine(_read(note_path, os.getpid()))


class TrialObserver:
    """Reports each epoch to the search, and each checkpoint at the end of one."""

    def __init__(self, line: TrialLine) -> None:
        self._line = line
        self._epochs: dict[int, int] = {}  # optimizer step -> epochs done by then
        self._is_leaving = False
        self._all_epochs = 0
        self._fit = 1

    def on(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._all_epochs, self._fit = event.epochs, RunDir(event.run_dir).fit_number
        elif isinstance(event, EpochEnded) and not self._is_leaving:  # what comes then is a part of an epoch
            self._epochs[event.step] = event.epoch + 1
            epoch = {"step": event.epoch + 1, "metrics": event.metrics, "is_last": event.epoch + 1 == self._all_epochs}
            answer = self._line.tell("report", **epoch, by="trainer", fit=self._fit)
            self._is_leaving = not answer["go"]
        elif isinstance(event, CheckpointSaved) and event.step in self._epochs:
            # between two epochs another trial can resume from it with another batch size
            self._line.tell("saved", step=self._epochs[event.step], path=event.path, fit=self._fit)

    def close(self) -> None:
        pass


def trial_observers() -> list[TrialObserver]:
    """For rank 0 of a training in a trial; none elsewhere."""
    path = trial_in_env()
    return [TrialObserver(trial_line(path))] if path else []


def report_read(names: Iterable[str]) -> None:
    """These parameters of the trial have had their effect."""
    path = trial_in_env()
    if path:
        trial_line(path).tell("read", names=sorted(names))


def trial_settings(note: TrialNote, fit: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of a trial's n-th `fit`: defaults that the script may override, and those that always win."""
    run = RunDir(Path(note.directory, note.run)).fit(fit)
    defaults = {"checkpoint_frequency": 1, "keep_last": 2, "progress": False}
    always = {
        "run_dir": str(run),
        "checkpoint_dir": str(run.checkpoints),
        "resume_from_checkpoint": True,
    }
    return defaults, always | note.settings


def newest_checkpoint(directory: str) -> tuple[str, int]:
    """The newest that a trial reported, and its step; "" and 0 where there is none."""
    folder = TrialDir(directory).checkpoints
    steps = sorted(path.name for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []
    return (str(folder / steps[-1]), int(steps[-1])) if steps else ("", 0)
