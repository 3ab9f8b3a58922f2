"""Scripts of TensorFlow without the seconds of its import: a process that has imported it forks them.

A script gets a folder, arguments, variables and output of its own, as if a shell had started it. The process is in
`warm_server`; it also forks the warm parents of launches, as the template does for those of torch.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.template import SOCKET

_TENSORFLOW = ("tensorflow", "keras", "tf_keras", "distributed.engines.tensorflow.worker")
_ROOT = Path(__file__).parents[1]


class WarmScripts:
    """A process that has imported modules; it ends with the one that started it."""

    def __init__(self, *modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.socket = os.path.join(self._folder.name, "socket")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.socket)
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.warm_server", str(listening.fileno()), *modules],
                cwd=_ROOT,
                env=environ,
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
            )
        atexit.register(self._close)

    def start(self, folder: Path, *argv: str, environ: dict[str, str]) -> Script:
        """`python *argv` in a folder; variables that Python reads when it starts have no effect."""
        return Script(self.socket, argv, folder, environ)

    def run(self, folder: Path, *argv: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        return self.start(folder, *argv, environ=environ).completed()

    def _close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


class WarmTensorFlow(WarmScripts):
    """Scripts of TensorFlow, and launches by them."""

    def start_code(self, folder: Path, code: str, *arguments: str, environ: dict[str, str]) -> Script:
        """`python train.py …` in a folder, into which the code is written."""
        (folder / "train.py").write_text(code)
        return self.start(folder, "train.py", *arguments, environ=environ | {SOCKET: self.socket})

    def run_code(
        self, folder: Path, code: str, *arguments: str, environ: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        return self.start_code(folder, code, *arguments, environ=environ).completed()


class Script:
    """What is used here of `subprocess.Popen`, of a process that is not a child of this one."""

    def __init__(self, address: str, argv: tuple[str, ...], folder: Path, environ: dict[str, str]) -> None:
        self.argv = argv
        self.returncode: int | None = None
        self._place = tempfile.TemporaryDirectory()
        self._paths = [Path(self._place.name) / name for name in ("out", "err")]
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(address)
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            socket.send_fds(self._line, [b"?"], [out.fileno(), err.fileno()])
        wanted = {"argv": argv, "cwd": str(folder), "environ": environ}
        self._line.sendall(json.dumps(wanted).encode())
        self._line.shutdown(socket.SHUT_WR)
        self._answers = self._line.makefile()
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], timeout)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        if self.wait(timeout) is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.argv, timeout)
        out, err = (path.read_text() for path in self._paths)
        self._line.close()
        self._place.cleanup()
        return out, err

    def completed(self, timeout: float = 400) -> subprocess.CompletedProcess[str]:
        out, err = self.communicate(timeout)
        return subprocess.CompletedProcess(self.argv, self.returncode or 0, out, err)


@cache
def warm_tensorflow() -> WarmTensorFlow:
    """The one of this process, started when it is first asked for."""
    return WarmTensorFlow(*_TENSORFLOW)
