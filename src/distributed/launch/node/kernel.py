"""Kernel: a launcher's calls of the operating system on processes; tests pass one without processes."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import psutil

from distributed.core.env import CONTROL_FD
from distributed.launch.request import ProcessSpec

HALTED, GONE = "Tt", "ZX"  # letters of a process's state


class Child(Protocol):
    """A process that was started, or that the warm parent will fork once its imports are done."""

    ended_by_us: bool
    why_never_started: str  # "": it was started, or is yet to be

    @property
    def started(self) -> bool: ...

    @property
    def pid(self) -> int:
        """The process id. Waits until the process is started; LaunchError if it never will be."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while the process runs. Never waits."""

    def cancel(self) -> None:
        """End the parent that would start this process, if it cannot fork yet."""


class Kernel:
    """The kernel of this machine."""

    def start(self, spec: ProcessSpec, environ: Mapping[str, str], log: int, control: socket.socket | None) -> Child:
        """Start a rank in its own interpreter, with its log and its end of the control connection."""
        line = {} if control is None else {CONTROL_FD: str(control.fileno())}
        # Its own session: Ctrl-C reaches only the launcher, which signals the ranks once.
        process = subprocess.Popen(
            spec.argv,
            env={**environ, **line},
            stdin=None if spec.has_input else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=() if control is None else (control.fileno(),),
            start_new_session=True,
        )
        return _Spawned(process)

    def kill(self, pid: int, number: int) -> None:
        """Signal one process; ProcessLookupError if it has ended."""
        os.kill(pid, number)

    def kill_group(self, group: int, number: int) -> None:
        os.killpg(group, number)

    def group_runs(self, group: int) -> bool:
        """Whether any process of a process group runs."""
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return False
        if not os.path.exists("/proc/self/stat"):
            return True
        # Zombies that no init process reaps, as in many containers, accept signals forever.
        return any(runs_in_group(int(name), group) for name in os.listdir("/proc") if name.isdigit())

    def state(self, pid: int) -> str:
        """The state letter of a process: R runs, S sleeps, D sleeps uninterruptibly, T stopped, t traced, X gone."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # the name may hold anything
        except (FileNotFoundError, ProcessLookupError):
            return "X"

    def sleeps_in(self, pid: int) -> str:
        """The kernel's function in which a process sleeps; "" if unknown."""
        try:
            return Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        except OSError:
            return ""

    def handles(self, pid: int, number: int) -> bool:
        """Whether a process has a handler for a signal, which would otherwise end it."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
        return bool(caught >> (number - 1) & 1)

    def forks(self, pid: int) -> list[int]:
        """The processes that a rank has forked; they write their stacks to the rank's file."""
        try:
            rank = psutil.Process(pid)
            exe = os.readlink(f"/proc/{pid}/exe")
            return [child.pid for child in rank.children() if os.readlink(f"/proc/{child.pid}/exe") == exe]
        except (psutil.Error, OSError):
            return []

    def describe_halt(self, pid: int) -> str:
        """Why the kernel does not run a process; "" if it may run."""
        state = self.state(pid)
        if state == "D":
            inside = self.sleeps_in(pid)
            return "uninterruptible sleep (D)" + (f" in the kernel's {inside}" if inside else "")
        return {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger"}.get(state, "")


class _Spawned:
    """A rank's process in its own interpreter."""

    started = True
    why_never_started = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.ended_by_us = False
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def cancel(self) -> None:
        """Does nothing: the process is started already."""


def runs_in_group(pid: int, group: int) -> bool:
    """Whether a process of this group runs. A zombie does not run."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, _, process_group = stat.read().rpartition(b")")[2].split()[:3]
    except OSError:
        return False
    return int(process_group) == group and state not in (b"Z", b"X")
