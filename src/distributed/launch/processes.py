"""RankProcess: one started rank with everything that it starts itself, so that nothing of it outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from distributed.core.env import CONTROL_FD
from distributed.core.private_files import FILE_MODE
from distributed.launch.request import ProcessSpec


class Child(Protocol):
    """A process that was started, or will be as soon as what starts it can."""

    ended_by_us: bool

    @property
    def started(self) -> bool: ...

    @property
    def pid(self) -> int:
        """Waits until it is started; LaunchError if it never will be."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it is to come. Never waits."""

    def cancel(self) -> None:
        """End what starts it, if that can start nothing yet."""


Start = Callable[[ProcessSpec, Mapping[str, str], int, socket.socket | None], Child]  # …, log, the rank's control


class RankProcess:
    """A rank and its process group (data loader workers are in it).

    `start` makes the process: a new interpreter, or with `WarmParent.start` a fork of one that has its imports behind
    it. `control` is our end of the line to the rank, where one is wanted.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        environ: Mapping[str, str],
        *,
        with_control: bool = False,
        start: Start | None = None,
    ) -> None:
        self.rank = spec.rank
        self.log_path = spec.log_path
        self.control: socket.socket | None = None
        self._gone = False  # with all of its group: the number may be another's from then on
        self._ended = False
        self._unsent: list[tuple[Callable[[int, int], None], int]] = []  # signals for a process that is to come
        plain = {name: value for name, value in environ.items() if name != CONTROL_FD}  # that was this process's own
        theirs: socket.socket | None = None
        log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, FILE_MODE)
        try:
            if with_control:
                self.control, theirs = socket.socketpair()
            self._child = (start or _spawn)(spec, plain, log, theirs)
        except BaseException:
            if self.control is not None:
                self.control.close()
            raise
        finally:
            os.close(log)
            if theirs is not None:
                theirs.close()

    @property
    def pid(self) -> int:
        """Waits for the process where it is yet to be forked."""
        return self._child.pid

    @property
    def ended_by_us(self) -> bool:
        return self._child.ended_by_us

    def poll(self) -> int | None:
        """The exit code once the rank has ended; what it left running is asked to end too."""
        code = self._child.poll()
        if not self._child.started:
            self._gone = code is not None
            return code
        unsent, self._unsent = self._unsent, []
        for send, number in unsent:
            self._send(send, number)
        if code is not None and not self._ended:
            self._ended = True
            self._send(os.killpg, signal.SIGTERM)
        if code is not None and not self._gone:
            self._gone = not _group_runs(self.pid)
        return code

    def signal(self, number: int) -> None:
        """To the rank alone: it decides what its children shall do."""
        if self.poll() is None:
            self._send(os.kill, number)

    def end(self, number: int) -> None:
        """End the rank and all of its children; its exit code says nothing from here on."""
        if self.poll() is None:
            self._child.ended_by_us = True
            if number == signal.SIGKILL and not self._child.started:
                self._child.cancel()
        self._send(os.killpg, number)

    def is_gone(self) -> bool:
        """Whether the rank and everything that it started have ended."""
        return self.poll() is not None and self._gone

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        if self._gone:
            return
        if not self._child.started:
            if (send, number) not in self._unsent:
                self._unsent.append((send, number))
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(self.pid, number)


class _Spawned:
    """A rank in an interpreter of its own."""

    started = True

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.ended_by_us = False
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def cancel(self) -> None:
        """It is started already."""


def _spawn(spec: ProcessSpec, environ: Mapping[str, str], log: int, control: socket.socket | None) -> Child:
    line = {} if control is None else {CONTROL_FD: str(control.fileno())}
    # A session of its own: Ctrl-C reaches the launcher alone, which tells the ranks once.
    process = subprocess.Popen(
        spec.argv,
        env={**environ, **line},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=() if control is None else (control.fileno(),),
        start_new_session=True,
    )
    return _Spawned(process)


def end_all(processes: Sequence[RankProcess], grace_s: float) -> None:
    """SIGTERM, and SIGKILL for whatever is still there after the grace; returns when nothing is."""
    for process in processes:
        process.end(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while not all(process.is_gone() for process in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.end(signal.SIGKILL)
        time.sleep(0.02)


def runs_in_group(pid: int, group: int) -> bool:
    """Whether a process runs and is of this group. One that ended and that nobody waited for does not run."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, _, process_group = stat.read().rpartition(b")")[2].split()[:3]
    except OSError:
        return False
    return int(process_group) == group and state not in (b"Z", b"X")


def _group_runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not os.path.exists("/proc/self/stat"):
        return True
    # Orphans whose init does not wait for them, as in many containers, answer to signals for ever.
    return any(runs_in_group(int(name), group) for name in os.listdir("/proc") if name.isdigit())
