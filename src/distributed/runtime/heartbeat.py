"""Heartbeat: this rank's progress, written to a mapped file at the cost of a memory store a step."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from distributed.core.atomic import make_private
from distributed.core.protocol.heartbeat import RECORD, Phase
from distributed.core.run_dir import AttemptDir

_STEP = struct.Struct("<qqqq")
_NAME_AT, _NAME_BYTES = _STEP.size, RECORD.size - _STEP.size
_WARM_UP = 3  # steps of an attempt that may compile
_FORGET = 0.99  # how much of the slowest step is remembered a step later


class Heartbeat:
    """`beat` after every step; `phase` around all that is not a step."""

    def __init__(self, attempt_dir: str | os.PathLike[str], rank: int) -> None:
        path = AttemptDir(attempt_dir).heartbeat(rank)
        make_private(path.parent)
        path.unlink(missing_ok=True)  # a process that has an older one mapped must not see it truncated
        self._step, self._warm_up, self._slowest, self._phase = 0, _WARM_UP, 0, int(Phase.STARTING)
        self._last = time.monotonic_ns()
        with path.open("w+b") as file:
            file.write(RECORD.pack(0, self._last, self._phase, 0, b""))
            file.flush()
            self._map = mmap.mmap(file.fileno(), RECORD.size)
        self._pack = _STEP.pack_into

    def beat(self, step: int) -> None:
        now = time.monotonic_ns()
        if self._warm_up:
            self._warm_up -= 1
        else:
            self._slowest = max(now - self._last, int(self._slowest * _FORGET))
            self._phase = 1
        self._step, self._last = step, now
        self._pack(self._map, 0, step, now, self._phase, self._slowest)

    def epoch_begins(self) -> None:
        """Loader workers start: its first step takes as long as it takes."""
        self._warm_up, self._phase = max(1, self._warm_up), int(Phase.STARTING)
        self._write()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """What happens inside has no deadline, and its time is no step's."""
        before, self._phase = self._phase, int(phase)
        self._write()
        try:
            yield
        finally:
            self._phase = before
            self._write()

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Inside, this rank waits for the others under this name."""
        if self._map.closed:  # the run has ended, and the script has collectives of its own
            yield
            return
        around = self._map[_NAME_AT:]
        self._map[_NAME_AT:] = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        try:
            yield
        finally:
            if not self._map.closed:
                self._map[_NAME_AT:] = around

    def _write(self) -> None:
        self._last = time.monotonic_ns()
        self._pack(self._map, 0, self._step, self._last, self._phase, self._slowest)

    def close(self) -> None:
        self._phase = int(Phase.ENDED)
        self._write()
        self._map.close()


Enter = Callable[[str], AbstractContextManager[None]]


def _nobody(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class _Listener:
    enter: Enter = staticmethod(_nobody)  # one a process, as it has one heartbeat


def tell_names_to(enter: Enter | None) -> None:
    """`enter` is called around every collective that belongs to no session, with its name; None: nothing is."""
    _Listener.enter = staticmethod(enter or _nobody)  # type: ignore[assignment]


def reported(name: str) -> AbstractContextManager[None]:
    """Around a wait for other ranks."""
    return _Listener.enter(name)
