"""StackQuery: asks a rank that makes no progress where it stands, and the data loader workers that it waits for."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from distributed.core.protocol.heartbeat import Beat
from distributed.launch.node.kernel import GONE, HALTED, Kernel
from distributed.launch.supervise.stacks import Whereabouts, data_line, parse_stacks, standing

_S = 1_000_000_000
_SETTLED_NS = _S // 10  # a dump that did not grow for this long is complete: faulthandler does not mark its end
_DUMP_TIMEOUT_NS = 2 * _S  # timeout for a stack dump; a loaded machine is slow
_WORKERS_NS = 2 * _S  # timeout for the dumps of all data loader workers


@dataclass(frozen=True)
class Watched:
    rank: int
    pid: int
    heartbeat: Path
    stack: Path  # where faulthandler of this rank, and of the workers that it forked, writes


class StackQuery:
    """The query of one rank's stacks, and, if it waits for data, of its data loader's workers."""

    def __init__(self, watched: Watched, beat: Beat, now: int, kernel: Kernel) -> None:
        self.watched, self.beat, self._kernel = watched, beat, kernel
        self._dump = _Dump(watched.pid, watched.stack, now, kernel)
        self._found: Whereabouts | None = None
        self._workers: list[int] | None = None  # not queried yet; None: unknown
        self._worker: _Dump | None = None
        self._workers_until = 0

    @property
    def text(self) -> str:
        return self._dump.text()

    def is_over(self, now: int) -> bool:
        if self._workers is None:
            if not self._dump.is_over(now):
                return False
            self._found = self._own_standing()
            needs_worker = self._found is not None and self._found.needs_worker
            self._workers = self._kernel.forks(self.watched.pid) if needs_worker else []
            self._workers_until = now + _WORKERS_NS
        return self._worker_is_found(now)

    def standing(self) -> Whereabouts | None:
        """The whereabouts so far; None if the process has ended."""
        return self._found

    def _own_standing(self) -> Whereabouts | None:
        state = self._kernel.state(self.watched.pid)
        if state in GONE:
            return None
        stacks = self._dump.text()
        halted = self._kernel.describe_halt(self.watched.pid) if state in HALTED or not stacks else ""
        return Whereabouts("stopped", halted) if halted else standing(parse_stacks(stacks), self.beat.collective)

    def _worker_is_found(self, now: int) -> bool:
        """Query the workers in sequence, because they write to the same file."""
        assert self._workers is not None
        while True:
            if self._worker is not None:
                if not self._worker.is_over(now) and now < self._workers_until:
                    return False
                stacks = self._worker.text()
                line = data_line(parse_stacks(stacks)) if stacks else self._kernel.describe_halt(self._worker.pid)
                self._worker = None
                if line:
                    self._found = Whereabouts("data", f"{line}, in a data loader worker")
                    self._workers.clear()
            if not self._workers or now >= self._workers_until:
                return True
            self._worker = _Dump(self._workers.pop(0), self.watched.stack, now, self._kernel)


class _Dump:
    """The stacks of one process, requested at construction.

    The file is not truncated: a process that has not opened it for appending would leave a hole.
    """

    def __init__(self, pid: int, path: Path, now: int, kernel: Kernel) -> None:
        self.pid, self._path = pid, path
        self._begins = self._size = self._now_size()
        self._asked_at = self._grew_at = now
        self._is_asked = kernel.state(pid) not in HALTED + GONE and kernel.handles(pid, signal.SIGUSR2)
        if self._is_asked:
            try:
                kernel.kill(pid, signal.SIGUSR2)
            except ProcessLookupError:
                self._is_asked = False

    def is_over(self, now: int) -> bool:
        size = self._now_size()
        if size != self._size:
            self._size, self._grew_at = size, now
            self._begins = self._begins if size >= self._begins else 0  # the file was truncated
        is_complete = size > self._begins and now - self._grew_at >= _SETTLED_NS
        return not self._is_asked or is_complete or now - self._asked_at >= _DUMP_TIMEOUT_NS

    def text(self) -> str:
        if not self._is_asked or self._size <= self._begins:
            return ""
        with self._path.open("rb") as file:
            file.seek(self._begins)
            return file.read(self._size - self._begins).replace(b"\0", b"").decode(errors="replace")

    def _now_size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0
