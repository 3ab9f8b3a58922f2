"""The end of a rank: files are written and `atexit` runs, within a bound, but no interpreter is finalized.

Threads of collectives that need the interpreter during finalization abort or hang a process that has done its work.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from distributed.launch.node.exit.unwritten import run_own_ends, write_all

_EXIT_FUNCTIONS_S = 300.0  # for what the program registered with `atexit`: an upload may take minutes
_WRITING_S = 60.0  # for files that the program left open
_BLOCKED_S = 5.0  # for a pipe that nobody reads
_STDERR = 2


def leave(exit_code: int) -> NoReturn:
    """Exit as Python does: wait for threads, run `atexit`, write what is open."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
    _run_exit_functions(exit_code)
    written = threading.Event()
    closing = threading.Thread(target=write_all, args=(written,), daemon=True)
    closing.start()
    if not written.wait(_WRITING_S):
        _say(f"files that the program left open are not written after {_WRITING_S:.0f} s; the rank ends without them")
    closing.join(_BLOCKED_S)
    _go(exit_code)


def _run_exit_functions(exit_code: int) -> None:
    def give_up() -> None:
        what = "functions registered with atexit, or a __del__,"
        _say(f"{what} still run after {_EXIT_FUNCTIONS_S:.0f} s; the rank ends without them")
        _with_stacks(faulthandler.dump_traceback, all_threads=True)
        _go(exit_code)

    watch = threading.Timer(_EXIT_FUNCTIONS_S, give_up)
    watch.daemon = True
    watch.start()
    # Where one of them holds the interpreter for good, no thread of Python's can end the process.
    _with_stacks(faulthandler.dump_traceback_later, timeout=_EXIT_FUNCTIONS_S + _WRITING_S, exit=True)
    atexit._run_exitfuncs()
    run_own_ends()
    watch.cancel()
    faulthandler.cancel_dump_traceback_later()


def _with_stacks(call: Callable[..., None], **options: Any) -> None:
    with contextlib.suppress(Exception):  # it is closed; sys.stderr may be any object of the program's, or None
        call(file=_STDERR, **options)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"distributed: {text}\n".encode())


def _go(exit_code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed by the program
            if stream is not None:
                stream.flush()
    os._exit(exit_code)
