"""What a benchmark starts as a user would, by a command, ends with it: all of it, also what the command started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import psutil

from distributed.core.env import inherited_environ

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def start_command(
    command: Sequence[str], folder: str, output: IO[bytes], environ: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A command in a folder of its own, with one thread a process; Ctrl-C is the benchmark's business."""
    return subprocess.Popen(
        command,
        env=inherited_environ() | _ONE_THREAD | (environ or {}),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def kill_all(started: subprocess.Popen[bytes]) -> None:
    """Kill a command and what it started: torchrun, killed alone, would leave its ranks behind."""
    if started.poll() is not None:
        return
    with suppress(psutil.Error):
        launcher = psutil.Process(started.pid)
        launcher.suspend()  # it starts nothing more
        for process in launcher.children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
    with suppress(ProcessLookupError):
        os.kill(started.pid, signal.SIGKILL)
    started.wait()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end a benchmark as Ctrl-C does: everything that was started is killed first."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
