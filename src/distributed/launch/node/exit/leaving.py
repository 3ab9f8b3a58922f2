"""The end of a rank: files are written and `atexit` runs, within a bound, but no interpreter is finalized.

Threads of collectives that need the interpreter during finalization abort or hang a process that has done its work.
What the program leaves in buffers is written as Python's own end does when it drops every object. No object is dropped
here: the destructor of a process group may wait for a thread that waits for the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import stat
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

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


# Writers that are no files and keep data until they are closed, by module and name, in that order.
_CLOSED = (
    ("torch.utils.tensorboard.writer", "SummaryWriter"),
    ("tensorboardX.writer", "SummaryWriter"),
    ("zipfile", "ZipFile"),
    ("h5py", "File"),
    ("pyarrow.parquet", "ParquetWriter"),
    ("shelve", "Shelf"),
    ("dbm.dumb", "_Database"),
    ("tempfile", "_TemporaryFileCloser"),  # which deletes the file of a NamedTemporaryFile
)
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), "<frozen ")


def run_own_ends() -> None:
    """Call `__del__` of every object whose class the program itself wrote, not a package that it uses."""
    _each(found.__del__ for found in gc.get_objects() if _is_own(getattr(type(found), "__del__", None)))


def _is_own(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and not any(folder in code.co_filename for folder in _INSTALLED)


def write_all(written: threading.Event) -> None:
    """Write what is open; `written` is set before that which may block, such as a pipe that nobody reads."""
    left = gc.get_objects()
    kept = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    plain: list[io.IOBase] = []  # of Python's own classes, which write everything at a flush
    others: list[io.IOBase] = []  # compressed or remote files, which need to be closed
    closed = tuple(_closed_kinds())
    writers: list[Any] = []
    for found in left:
        kind = type(found)  # not `isinstance`, which asks objects for their class: some of torch's warn then
        if issubclass(kind, io.IOBase) and id(found) not in kept:
            (plain if kind.__module__ == "_io" else others).append(found)
        elif issubclass(kind, closed):
            writers.append(found)
    writers.sort(key=lambda writer: next(place for place, kind in enumerate(closed) if issubclass(type(writer), kind)))
    blocking = [file for file in plain if _may_block(file)]
    ready = [file for file in plain if file not in blocking]
    _each(file.flush for file in ready if isinstance(file, io.TextIOBase))
    _each(file.close for file in (*writers, *others))
    _each(file.flush for file in ready)
    written.set()
    _each([lambda: ctypes.CDLL(None).fflush(None)])  # the files of C, among them its standard output
    _each(file.flush for file in (*(file for file in blocking if isinstance(file, io.TextIOBase)), *blocking))


def _closed_kinds() -> Iterable[type]:
    for name, kind in _CLOSED:
        found = getattr(sys.modules.get(name), kind, None)
        if isinstance(found, type):
            yield found


def _each(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        with contextlib.suppress(Exception):  # a full disk, a file that is closed: Python's own end goes on as well
            call()


def _may_block(file: io.IOBase) -> bool:
    """Whether nobody may read what is written to it: a pipe, a socket, a terminal."""
    try:
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # no file of the system, or closed
        return False
