"""The first code that runs in a rank: it runs the user's program as Python would, and records its failure.

It is started by `entry.py`, or forked by `warm.py`. Imports stay light: what is loaded here is loaded before the
user's program in every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from distributed.core.env import FAILURE_MARK, known_control_fd, launcher_pid, worker_env
from distributed.core.errors import DistributedError
from distributed.core.protocol.failure import FailureRecord, is_collateral
from distributed.core.protocol.gpu_memory import is_of_gpu, write_memory
from distributed.core.run_dir import AttemptDir, RunDir
from distributed.launch.node import program
from distributed.launch.node.exit import gloo_threads
from distributed.launch.node.exit.leaving import leave

_PR_SET_PDEATHSIG = 1
_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def run(command: list[str]) -> NoReturn:
    """Be the rank that runs this program, as if Python had been started with it."""
    sys.orig_argv = [sys.executable, *command]
    program.set_title(sys.orig_argv)
    leave(main(command, gives_way=True))


def main(command: list[str], *, gives_way: bool = False) -> int:
    """Run the program to its end; the exit code. `gives_way`: to the user's own module of this package's name."""
    die_with(launcher_pid())
    gloo_threads.install()
    faulthandler.enable()
    control = known_control_fd()
    if control is not None:  # the connection belongs to this process, and not to programs that it starts
        os.set_inheritable(control, False)
    files = _own_files()
    if files is not None:
        _dump_stacks_when_asked(files)
    try:
        module, code = program.load(command)
        # The program is the main module from here on, so that pickle and multiprocessing find its definitions.
        sys.modules["__main__"] = module
        if gives_way:
            program.give_way(command)
        exec(code, module.__dict__)
    except KeyboardInterrupt:
        return 130
    except SystemExit as ending:
        exit_code = _exit_code(ending)
        if exit_code:
            _report(ending, exit_code, files)
        return exit_code
    except BaseException as error:  # noqa: BLE001 - the process boundary: the failure is written down, the rank ends
        exit_code = error.exit_code if isinstance(error, DistributedError) else 1
        _report(error, exit_code, files)
        return exit_code
    return 0


def _exit_code(ending: SystemExit) -> int:
    if ending.code is None:
        return 0
    return ending.code & 0xFF if isinstance(ending.code, int) else 1


@dataclass(frozen=True)
class _Files:
    """The files of this rank that its launcher reads."""

    attempt: AttemptDir
    rank: int


def _own_files() -> _Files | None:
    """The files, resolved before the program runs, which may change directory and environment."""
    place = worker_env()
    if place is None or not place.run_dir:
        return None
    return _Files(RunDir(os.path.abspath(place.run_dir)).attempt(place.attempt), place.rank)


def _report(error: BaseException, exit_code: int, files: _Files | None) -> None:
    """Write a failure to the launcher's failure file, and after a mark to this rank's log."""
    error.__traceback__ = _without_bootstrap(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    if files is not None:
        if is_of_gpu(type(error).__name__, _message(error)):
            _write_memory(files)
        FailureRecord(
            rank=files.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            time=time.time(),
            type=type(error).__name__,
            message=_message(error),
            traceback=text,
            exit_code=exit_code,
            collateral=is_collateral(error),
        ).write(files.attempt.failure(files.rank))
    with contextlib.suppress(Exception):  # the streams and the hook may be the program's own; the failure is recorded
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        print(FAILURE_MARK, file=sys.stderr)
        if sys.excepthook is sys.__excepthook__:
            print(text, file=sys.stderr, end="", flush=True)
        else:
            sys.excepthook(type(error), error, error.__traceback__)


def _write_memory(files: _Files) -> None:
    """Write the GPU memory report before the failure is reported, because the launcher reads it next."""
    with contextlib.suppress(Exception):  # a failed device or a full disk must not hide the failure itself
        write_memory(files.attempt.memory(files.rank), files.rank, with_picture=True)


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the program ended itself with exit code {error.code}" if isinstance(error.code, int) else str(error)
    try:
        return str(error)
    except Exception as unprintable:  # noqa: BLE001 - the message of a user's exception is the user's code
        return f"<its message cannot be printed: {type(unprintable).__name__}>"


def _without_bootstrap(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace


def _dump_stacks_when_asked(files: _Files) -> None:
    """SIGUSR2 writes the stacks of all threads, even while the interpreter is held by a call that does not return."""
    if not hasattr(faulthandler, "register"):
        return
    with contextlib.suppress(OSError):  # without the folder nobody reads the stacks
        stacks = files.attempt.stack(files.rank).open("w")
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=False)


def die_with(parent: int | None) -> None:
    """Let the kernel end this rank if its launcher is killed."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)
