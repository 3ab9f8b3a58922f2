"""The first code that runs in a rank: it runs the user's program as Python would, and writes down how it failed.

`python -m distributed.launch.rank script.py args…` or `… -m package.module args…`. Imports stay light: what is loaded
here is loaded before the user's program in every rank.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from distributed.core.env import CONTROL_FD, FAILURE_MARK, launcher_pid, worker_env
from distributed.core.errors import DistributedError
from distributed.core.failure import FailureRecord, failure_path, is_collateral, rank_of

_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Run the program to its end; the exit code of this rank."""
    die_with(launcher_pid())
    faulthandler.enable()
    if CONTROL_FD in os.environ:  # the line is this process's alone, not that of the programs which it starts
        os.set_inheritable(int(os.environ[CONTROL_FD]), False)
    record_path = _record_path()
    if record_path is not None:
        _dump_stacks_when_asked(record_path)
    try:
        module, code = _program(command)
        # The program is the main module from here on, so that pickle and multiprocessing find what it defines.
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except KeyboardInterrupt:
        return 130
    except SystemExit as ending:
        exit_code = _exit_code(ending)
        if exit_code:
            _report(ending, exit_code, record_path)
        return exit_code
    except BaseException as error:  # the process boundary: the failure is written down, then the rank ends
        exit_code = error.exit_code if isinstance(error, DistributedError) else 1
        _report(error, exit_code, record_path)
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
    return main_module, compile(Path(path).read_bytes(), path, "exec")


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


def _record_path() -> Path | None:
    """Where to write a failure; found before the program runs, which may change directory and environment."""
    place = worker_env()
    if place is None or not place.run_dir:
        return None
    return failure_path(os.path.abspath(place.attempt_dir(place.run_dir)), place.rank)


def _report(error: BaseException, exit_code: int, record_path: Path | None) -> None:
    """Into the failure file for the launcher, and after a mark into this rank's log."""
    error.__traceback__ = _without_bootstrap(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    if record_path is not None:
        FailureRecord(
            rank=rank_of(record_path),
            host=socket.gethostname(),
            pid=os.getpid(),
            time=time.time(),
            type=type(error).__name__,
            message=_message(error),
            traceback=text,
            exit_code=exit_code,
            collateral=is_collateral(error),
        ).write(record_path)
    if sys.stdout is not None:
        sys.stdout.flush()
    print(FAILURE_MARK, file=sys.stderr)
    if sys.excepthook is sys.__excepthook__:
        print(text, file=sys.stderr, end="", flush=True)
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the program ended itself with exit code {error.code}" if isinstance(error.code, int) else str(error)
    try:
        return str(error)
    except Exception as unprintable:
        return f"<its message cannot be printed: {type(unprintable).__name__}>"


def _without_bootstrap(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _dump_stacks_when_asked(record_path: Path) -> None:
    """SIGUSR2 writes the stacks of all threads, even while the interpreter is held by a call that does not return."""
    if not hasattr(faulthandler, "register"):
        return
    with contextlib.suppress(OSError):  # the folder is not there: nobody looks into it either
        stacks = record_path.with_name(f"stack-{rank_of(record_path)}.txt").open("w")
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=False)


def die_with(parent: int | None) -> None:
    """A launcher that is killed cannot end what it started, so the kernel does."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel was told
        os._exit(1)


def leave(exit_code: int) -> NoReturn:
    """End as Python does, but without tearing the interpreter down.

    Threads of the collectives that ask for the interpreter while it goes away abort a process that has done its work.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
