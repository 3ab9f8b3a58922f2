"""Stands for Python where Ray and its drivers are started: a template process forks what was to be run.

It lives as long as that does, passes signals on and ends in the same way, so that whoever started it sees no
difference. It imports little, since there is one of it for every process of a cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

AS_PYTHON = "TEST_RAY_PYTHON"  # what a program that starts a cluster itself has for Python


class Forked:
    """A process that the template at `path` has forked. It is killed when whoever asked for it is gone."""

    def __init__(
        self, path: str, argv: Sequence[str], environ: Mapping[str, str], streams: tuple[int, int, int], executable: str
    ) -> None:
        wanted = {"argv": [*argv], "environ": dict(environ), "folder": os.getcwd(), "executable": executable}
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(path)
        socket.send_fds(self._line, [b"?"], streams)
        self._line.sendall(json.dumps(wanted).encode() + b"\n")
        self._answers = self._line.makefile()
        self.pid = int(self._answers.readline())

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        return int(self._answers.readline() or -signal.SIGKILL)


def main(executable: str, path: str, argv: list[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # without a template, as ever
        forked = Forked(path, argv, os.environ, (0, 1, 2), os.environ.get(AS_PYTHON, executable))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: forked.send_signal(number))
        code = forked.wait()
        if code < 0:
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
    os.execv(executable, [executable, *argv])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
