"""The first code that runs in a rank: it runs the user's program as Python would, and records its failure.

`python -m distributed.launch.node.rank script.py args…` or `… -m package.module args…`. Imports stay light: what is
loaded here is loaded before the user's program in every rank.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import io
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from distributed.core.env import FAILURE_MARK, known_control_fd, launcher_pid, worker_env
from distributed.core.errors import DistributedError
from distributed.core.protocol.failure import FailureRecord, is_collateral
from distributed.core.protocol.gpu_memory import is_of_gpu, write_memory
from distributed.core.run_dir import AttemptDir, RunDir

_PR_SET_PDEATHSIG = 1
# Writers that are no files and keep data until they are closed, by module and name.
_CLOSED = (
    ("torch.utils.tensorboard.writer", "SummaryWriter"),
    ("tensorboardX.writer", "SummaryWriter"),
    ("zipfile", "ZipFile"),
)
_CLOSING_S = 5.0  # for files that the program left open: one may lead to a pipe that nobody reads


def main(command: list[str]) -> int:
    """Run the program to its end; the exit code of this rank."""
    die_with(launcher_pid())
    faulthandler.enable()
    control = known_control_fd()
    if control is not None:  # the connection belongs to this process, and not to programs that it starts
        os.set_inheritable(control, False)
    files = _own_files()
    if files is not None:
        _dump_stacks_when_asked(files)
    try:
        module, code = _program(command)
        # The program is the main module from here on, so that pickle and multiprocessing find its definitions.
        sys.modules["__main__"] = module
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


def _program(command: list[str]) -> tuple[ModuleType, CodeType]:
    """The program as a fresh `__main__` and its code, with sys.argv and sys.path as `python` itself sets them."""
    if command[0] == "-m":
        return _module_program(command[1], command[2:])
    path = os.path.abspath(command[0])
    sys.argv = list(command)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __file__=path, __builtins__=builtins, __spec__=None, __loader__=SourceFileLoader("__main__", path)
    )
    # Without what this file imports from __future__: it would make strings of the script's annotations.
    return main_module, compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _module_program(name: str, arguments: list[str]) -> tuple[ModuleType, CodeType]:
    spec = _runnable_spec(name)
    assert spec.loader is not None
    code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if code is None:
        raise ImportError(f"no code object available for {spec.name}")
    sys.argv = [spec.origin or name, *arguments]
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __builtins__=builtins,
        __spec__=spec,
        __loader__=spec.loader,
        __package__=spec.parent,
    )
    return main_module, code


def _runnable_spec(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec


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
    if sys.stdout is not None:
        sys.stdout.flush()
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
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
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


def leave(exit_code: int) -> NoReturn:
    """Exit as Python does, but without finalizing the interpreter.

    Threads of collectives that need the interpreter during finalization abort a process that has done its work.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
    atexit._run_exitfuncs()
    closing = threading.Thread(target=_close_files, daemon=True)
    closing.start()
    closing.join(_CLOSING_S)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


def _close_files() -> None:
    """Write what the program left in buffers, as Python's own end does when it closes every file."""
    left = gc.get_objects()
    kept = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    plain: list[io.IOBase] = []  # of Python's own classes, which write everything at a flush
    others: list[Any] = []  # compressed or remote files and writers with a thread, which need to be closed
    closed = tuple(getattr(sys.modules[name], kind) for name, kind in _CLOSED if name in sys.modules)
    for found in left:
        if isinstance(found, io.IOBase) and id(found) not in kept:
            (plain if type(found).__module__ == "_io" else others).append(found)
        elif isinstance(found, closed):
            others.append(found)
    plain.sort(key=_may_block)
    texts = [file for file in plain if isinstance(file, io.TextIOBase)]
    for write in (*(file.flush for file in texts), *(file.close for file in others), *(file.flush for file in plain)):
        with contextlib.suppress(Exception):  # a full disk, a file that is closed: Python's own end goes on as well
            write()


def _may_block(file: io.IOBase) -> bool:
    """Whether nobody may read what is written to it: a pipe, a socket, a terminal."""
    try:
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # no file of the system, or closed
        return False


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
