"""`distributed …` without the seconds that a process needs to import torch: a process that has done so forks for each.

Run as a script it is that process. It computes nothing itself, so that what it forks finds torch as new; each command
has its own folder, variables, output and exit code, as if a shell had started it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any


class WarmCommands:
    """Runs commands one after the other; ends with this process."""

    def __init__(self) -> None:
        self._process = self._start()
        atexit.register(self._close)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, *arguments: str, folder: Path, environ: dict[str, str], timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as place:
            out, err = Path(place) / "out", Path(place) / "err"
            if self._process.poll() is not None:  # ended with what a failed test left running
                self._process = self._start()
            wanted = {"arguments": arguments, "folder": str(folder), "environ": environ, "timeout_s": timeout_s}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(wanted | {"out": str(out), "err": str(err)}) + "\n")
            self._process.stdin.flush()
            code = json.loads(self._process.stdout.readline())
            return subprocess.CompletedProcess(["distributed", *arguments], code, out.read_text(), err.read_text())

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@cache
def warm_commands() -> WarmCommands:
    """The one of this process, started when it is first asked for."""
    return WarmCommands()


def serve() -> None:
    """Answers each line with the exit code of its command."""

    import distributed.checkpoint.exchange.export
    import distributed.checkpoint.exchange.importing
    import distributed.cli.main
    import distributed.trainers.trainer  # noqa: F401

    gc.freeze()  # else a collection copies every page that is shared
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        wanted = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = _command(wanted)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # to take a process with torch in it apart takes longer than most commands
        answers.write(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) + "\n")
        answers.flush()


def _command(wanted: dict[str, Any]) -> int:
    from distributed.cli.main import main

    signal.alarm(round(wanted["timeout_s"]))
    for number, target in ((0, "/dev/null"), (1, wanted["out"]), (2, wanted["err"])):
        os.dup2(os.open(target, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environ"])
    sys.path[0] = wanted["folder"]
    sys.argv = ["distributed", *wanted["arguments"]]
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:  # noqa: BLE001 - the process boundary of a command
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve()
