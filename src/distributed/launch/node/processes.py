"""RankProcess: one started rank and its child processes, none of which outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from distributed.core.atomic import FILE_MODE
from distributed.core.env import CONTROL_FD
from distributed.launch.clock import Clock
from distributed.launch.node.kernel import Child, Kernel
from distributed.launch.request import ProcessSpec

Start = Callable[[ProcessSpec, Mapping[str, str], int, socket.socket | None], Child]  # …, log, the rank's control


class RankProcess:
    """A rank and its process group (data loader workers are in it).

    `start` makes the process: a new interpreter, or with `WarmParent.start` a fork of one that has done its imports.
    `control` is the launcher's end of the connection to the rank, if there is one.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        environ: Mapping[str, str],
        *,
        with_control: bool = False,
        start: Start | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        self.rank = spec.rank
        self.log_path = spec.log_path
        self.control: socket.socket | None = None
        self._kernel = kernel or Kernel()
        self._gone = False  # with its whole process group: the pid may be reused from then on
        self._ended = False
        self._unsent: list[tuple[Callable[[int, int], None], int]] = []  # signals for a process that is not yet forked
        plain = {name: value for name, value in environ.items() if name != CONTROL_FD}  # not the launcher's own
        theirs: socket.socket | None = None
        log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, FILE_MODE)
        try:
            if with_control:
                self.control, theirs = socket.socketpair()
            self._child = (start or self._kernel.start)(spec, plain, log, theirs)
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
        """The process id; waits for a process that is not yet forked."""
        return self._child.pid

    @property
    def ended_by_us(self) -> bool:
        return self._child.ended_by_us

    @property
    def why_never_started(self) -> str:
        return self._child.why_never_started

    def poll(self) -> int | None:
        """The exit code once the rank has ended; child processes that it left get SIGTERM."""
        code = self._child.poll()
        if not self._child.started:
            self._gone = code is not None
            return code
        unsent, self._unsent = self._unsent, []
        for send, number in unsent:
            self._send(send, number)
        if code is not None and not self._ended:
            self._ended = True
            self._send(self._kernel.kill_group, signal.SIGTERM)
        if code is not None and not self._gone:
            self._gone = not self._kernel.group_runs(self.pid)
        return code

    def signal(self, number: int) -> None:
        """Signal the rank only; it decides what its child processes do."""
        if self.poll() is None:
            self._send(self._kernel.kill, number)

    def end(self, number: int) -> None:
        """End the rank and its child processes; its exit code means nothing from here on."""
        if self.poll() is None:
            self._child.ended_by_us = True
            if number == signal.SIGKILL and not self._child.started:
                self._child.cancel()
        self._send(self._kernel.kill_group, number)

    def is_gone(self) -> bool:
        """Whether the rank and all of its child processes have ended."""
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


def end_all(processes: Sequence[RankProcess], grace_s: float, clock: Clock | None = None) -> None:
    """Send SIGTERM, and SIGKILL to processes that still run after the grace; returns when none does."""
    clock = clock or Clock()
    for process in processes:
        process.end(signal.SIGTERM)
    deadline = clock.monotonic() + grace_s
    while not all(process.is_gone() for process in processes):
        if clock.monotonic() > deadline:
            for process in processes:
                process.end(signal.SIGKILL)
        clock.sleep(0.02)
