"""What a program leaves in buffers at its end, written as Python's own end does when it drops every object.

No object is dropped here: the destructor of a process group may wait for a thread that waits for the interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import stat
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from typing import Any

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
