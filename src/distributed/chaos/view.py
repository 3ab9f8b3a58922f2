"""RunView: a run seen from outside, by what it writes and by its processes. It sends nothing to the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from distributed.core.events import Event
from distributed.core.protocol.heartbeat import Beat, Phase, read_beat
from distributed.core.run_dir import AttemptDir, RunDir
from distributed.observe.follow import Follower

_E = TypeVar("_E", bound=Event)


class RunView:
    """`refresh` reads what is new; the other methods return what is known."""

    def __init__(self, run_dir: Path, launchers: Sequence[psutil.Process]) -> None:
        self.run_dir = run_dir
        self.launchers = list(launchers)
        self._collector = _Collector()
        self._follower = Follower(run_dir, self._collector, from_end=False)
        self.attempt = -1
        self.beats: dict[int, Beat] = {}
        self.reached = 0  # the highest step that any rank has finished

    def refresh(self) -> None:
        self._follower.refresh()
        self.attempt = max(RunDir(self.run_dir).attempt_numbers(), default=-1)
        found = {rank: read_beat(path) for rank, path in self._attempt_dir.heartbeats().items()}
        self.beats = {rank: beat for rank, beat in found.items() if beat is not None}
        self.reached = max([self.reached, *(beat.step for beat in self.beats.values())])

    @property
    def events(self) -> list[Event]:
        return self._collector.events

    @property
    def step(self) -> int:
        """The highest step that the ranks of this attempt have finished."""
        return max((beat.step for beat in self.beats.values()), default=0)

    @property
    def is_training(self) -> bool:
        """Whether every rank of this attempt has come to its loop, and none to its end."""
        return bool(self.beats) and all(beat.step > 0 and beat.phase is not Phase.ENDED for beat in self.beats.values())

    @property
    def is_alive(self) -> bool:
        return any(lives(launcher) for launcher in self.launchers)

    def of(self, kind: type[_E], since: float = 0.0) -> list[_E]:
        return [event for event in self.events if isinstance(event, kind) and event.time >= since]

    def beat(self, rank: int) -> Beat | None:
        return read_beat(self._attempt_dir.heartbeat(rank))

    def ranks(self) -> dict[int, psutil.Process]:
        """The process of each rank: the first of those that have its heartbeat mapped, as its children inherit that."""
        files = {str(path.resolve()): rank for rank, path in self._attempt_dir.heartbeats().items()}
        mapped = [(process, rank) for process in self._descendants() for rank in _heartbeats(process, files)]
        known = {(process.pid, rank) for process, rank in mapped}
        return {rank: process for process, rank in mapped if (process.ppid(), rank) not in known}

    def parents(self) -> list[psutil.Process]:
        """The processes that ranks are forked from."""
        ranks = {process.pid for process in self.ranks().values()}
        children = [child for launcher in self.launchers if lives(launcher) for child in launcher.children()]
        return [child for child in children if child.pid not in ranks and child.children()]

    @property
    def _attempt_dir(self) -> AttemptDir:
        return RunDir(self.run_dir).attempt(self.attempt)

    def _descendants(self) -> Iterator[psutil.Process]:
        for launcher in self.launchers:
            if lives(launcher):
                yield from launcher.children(recursive=True)


class _Collector:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def _heartbeats(process: psutil.Process, files: Mapping[str, int]) -> list[int]:
    """The ranks among these whose heartbeat a process has mapped."""
    try:
        text = Path("/proc", str(process.pid), "maps").read_text()
        process.ppid()
    except (OSError, psutil.NoSuchProcess):  # it has just ended
        return []
    mapped = {line.split(maxsplit=5)[-1] for line in text.splitlines()}
    return sorted(rank for path, rank in files.items() if path in mapped)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those of them that still live after so long."""
    until = time.monotonic() + seconds
    while (living := [process for process in processes if lives(process)]) and time.monotonic() < until:
        time.sleep(0.05)
    return living
