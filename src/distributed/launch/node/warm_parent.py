"""WarmParent: the launcher's side of the process that forks the ranks, so that no rank spends time on imports.

A request is a length, then JSON, with the rank's log and control connection as descriptors. Replies are JSON lines:
`{"id", "pid"}` from a rank as soon as it can be signalled, `{"id", "status"}` from its parent when it has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from distributed.core.errors import LaunchError
from distributed.launch.node.command import warm_argv
from distributed.launch.node.kernel import Child, runs_in_group
from distributed.launch.node.preloading import ALWAYS
from distributed.launch.node.processes import RankProcess
from distributed.launch.node.warm import LENGTH_BYTES
from distributed.launch.request import ProcessSpec

_ORPHAN_S = 2.0  # for a rank to end after its parent


class WarmParent:
    """A process that imports `preload` and then forks ranks; it ends with this process and with the creating thread.

    `environ` holds the variables that all ranks share: libraries read many of them once, at import. The process starts
    at once; only `RankProcess.pid` waits for its imports.
    """

    def __init__(
        self, python: str, environ: Mapping[str, str], preload: Sequence[str] = ALWAYS, *, log_path: str = os.devnull
    ) -> None:
        self._log_path = log_path
        self._children: list[_Forked] = []
        self._received = b""
        self._hung_up = False
        self._line, theirs = socket.socketpair()
        argv = [*warm_argv(python, theirs.fileno(), os.getpid(), preload)]
        try:
            with theirs, open(log_path, "ab") as log:
                self._process = self.spawn(argv, environ, theirs, log.fileno())
        except OSError as error:
            self._line.close()
            raise LaunchError(
                "the process that ranks are forked from could not be started", why=str(error), do=f"check {python}"
            ) from error

    @staticmethod
    def spawn(argv: list[str], environ: Mapping[str, str], line: socket.socket, log: int) -> subprocess.Popen[bytes]:
        """Start the process with its end of the connection."""
        return subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(line.fileno(),),
            start_new_session=True,
        )

    @staticmethod
    def is_supported() -> bool:
        """Whether a fork is safe on this system; elsewhere the system's own libraries run threads."""
        return sys.platform == "linux"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        self._drain()
        return not self._hung_up and self._process.poll() is None

    def fileno(self) -> int:
        """The connection's descriptor, for `select`: readable when a rank has started or ended."""
        return self._line.fileno()

    def start(self, spec: ProcessSpec, environ: Mapping[str, str], with_control: bool = False) -> RankProcess:
        """Request a rank with exactly this environment; it starts as soon as the imports are done."""
        return RankProcess(spec, environ, with_control=with_control, start=self._request)

    def close(self) -> None:
        """End the process, and with it the remaining ranks."""
        for child in self._children:
            child.ended_by_us = child.ended_by_us or child.poll() is None
        self._process.kill()
        self._process.wait()
        self._hang_up()

    def _request(self, spec: ProcessSpec, environ: Mapping[str, str], log: int, control: socket.socket | None) -> Child:
        child = _Forked(self, spec.rank)
        request = {
            "id": len(self._children),
            "argv": spec.argv,
            "environ": dict(environ),
            "cwd": os.getcwd(),
            "has_input": spec.has_input,
        }
        body = json.dumps(request).encode()
        descriptors = [log, *([0] if spec.has_input else []), *([] if control is None else [control.fileno()])]
        try:
            if not self.is_alive:
                raise BrokenPipeError("it has ended")
            socket.send_fds(self._line, [len(body).to_bytes(LENGTH_BYTES, "big")], descriptors)
            self._line.sendall(body)
        except OSError as error:
            raise LaunchError(
                f"rank {spec.rank} could not be forked: {error}",
                why=f"the process that ranks are forked from is gone (exit code {self._process.poll()})",
                do=f"see {self._log_path}; warm_start=False starts every rank by itself"
                if self._log_path != os.devnull
                else "start the run again; warm_start=False starts every rank by itself",
            ) from error
        self._children.append(child)
        return child

    def _drain(self, wait: bool = False) -> None:
        """Read the reports of the process; with `wait`, until there is one."""
        if self._hung_up:
            return
        if wait:
            poll = select.poll()
            poll.register(self._line, select.POLLIN)
            poll.poll()
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    part = self._line.recv(65536, socket.MSG_DONTWAIT)
                except ConnectionResetError:  # the process ended with requests unread
                    part = b""
                if not part:
                    self._process.wait()
                    self._hang_up()
                    return
                *lines, self._received = (self._received + part).split(b"\n")
                for line in lines:
                    report = json.loads(line)
                    self._children[report["id"]].hear(report.get("pid"), report.get("status"))

    def _hang_up(self) -> None:
        self._hung_up = True
        self._line.close()
        for child in self._children:
            child.orphan(self._process.poll())

    def _cancel(self) -> None:
        """Kill the process while no rank runs yet, so that imports that hang delay nothing."""
        if not any(child.known_pid for child in self._children):
            self.close()


class _Forked:
    """A rank that the warm parent forks, known by the parent's reports."""

    def __init__(self, parent: WarmParent, rank: int) -> None:
        self.ended_by_us = False
        self.why_never_started = ""
        self.known_pid: int | None = None
        self._parent = parent
        self._rank = rank
        self._code: int | None = None
        self._orphaned = False

    @property
    def started(self) -> bool:
        self._parent._drain()
        return self.known_pid is not None

    @property
    def pid(self) -> int:
        self._parent._drain()
        while self.known_pid is None:
            if self._code is not None:
                raise LaunchError(
                    f"rank {self._rank} was never forked",
                    why="the process that ranks are forked from ended before, or could not fork",
                    do="start the run again; warm_start=False starts every rank by itself",
                )
            self._parent._drain(wait=True)
        return self.known_pid

    def poll(self) -> int | None:
        self._parent._drain()
        if self._code is None and self._orphaned and not self._runs():
            self._code = -signal.SIGKILL
        return self._code

    def cancel(self) -> None:
        self._parent._cancel()

    def hear(self, pid: int | None, status: int | None) -> None:
        if pid is not None:
            self.known_pid = pid
        if status is not None:
            self._code = os.waitstatus_to_exitcode(status)

    def orphan(self, exit_code: int | None) -> None:
        """End a rank whose parent is gone: the kernel kills it, unless the rank has changed that."""
        self._orphaned = True
        if self.known_pid is None:
            if exit_code is not None and exit_code >= 0 and not self.ended_by_us:
                self.why_never_started = f"the process that ranks are forked from ended with exit code {exit_code}"
            self._code = -signal.SIGKILL if self._code is None else self._code
        elif self._code is None and self._runs():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.known_pid, signal.SIGKILL)
            deadline = time.monotonic() + _ORPHAN_S  # so that the exits of all ranks are noticed at once, as one fault
            while self._runs() and time.monotonic() < deadline:
                time.sleep(0.005)

    def _runs(self) -> bool:
        return self.known_pid is not None and runs_in_group(self.known_pid, self.known_pid)
