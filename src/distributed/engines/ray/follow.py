"""Following: a run that Ray supervises, seen through its run directory: attempts, faults, recoveries, what ranks print.

It reports them as the events of our own supervisor, so that a run's events are the same on Ray.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ray import available_resources

from distributed.core.atomic import append_line
from distributed.core.errors import RankFailedError
from distributed.core.events import AttemptEnded, Event, RankFailed, Recovered, Warned
from distributed.core.protocol.heartbeat import read_beat
from distributed.core.run_dir import AttemptDir, RunDir
from distributed.engines.ray.cluster import PlacementRequest
from distributed.engines.ray.verdict import AttemptEnd, ranks_of
from distributed.launch.node.log_mirror import LogMirror
from distributed.launch.node.log_tail import crash_dump
from distributed.launch.preflight import next_attempt
from distributed.launch.supervise.first_failure import Ending, failure_error
from distributed.launch.supervise.policy import Fault
from distributed.launch.supervise.report import RunReport

_PATIENT_S = 30.0  # for Ray to place the ranks, before it is said what they wait for


class Following:
    """`look` now and then, and `close` at the end."""

    def __init__(self, run_dir: str, first_attempt: int, mirror: LogMirror, placement: PlacementRequest) -> None:
        self._run_dir, self._mirror, self._placement = run_dir, mirror, placement
        self._events = RunDir(run_dir).events
        self._report = RunReport()
        self._attempt, self._first, self._next = -1, first_attempt, first_attempt
        self._unfollowed: list[int] = []  # ranks of this attempt whose log is not there yet
        self._world_size, self._reached, self._worlds = 0, 0, 0
        self._end: AttemptEnd | None = None
        self._broke_at: float | None = None
        self._step_at = self._waits_since = time.monotonic()
        self._has_warned = False

    def look(self) -> None:
        """Report what has happened since."""
        for attempt in range(self._next, next_attempt(self._run_dir)):
            folder = self._folder(attempt)  # a world may also end before it has ranks, and leave its end only, or none
            if ranks_of(folder) or AttemptEnd.read(folder) is not None:
                self._begin(attempt)
        if self._attempt < 0 or self._end is not None:
            self._wait_for_ranks()
        else:
            self._look_at_attempt()
        self._mirror.drain()
        self._mirror.refresh()

    @property
    def has_ranks(self) -> bool:
        """Whether there are ranks that could save something."""
        return self._attempt >= 0 and self._end is None

    def finish(self) -> None:
        self._mirror.finish()

    def failure(self) -> RankFailedError | None:
        """The error of a run that was given up; also as an event."""
        attempts = reversed(range(self._first, next_attempt(self._run_dir)))
        ends = (AttemptEnd.read(self._folder(attempt)) for attempt in attempts)
        end = next((end for end in ends if end is not None), None)
        if end is None or not end.given_up:
            return None
        fault, path = end.fault, end.log_path if os.path.exists(end.log_path) else ""
        self._mirror.finish(only=path)
        failed = RankFailed(time=time.time(), rank=fault.rank, host=fault.host, message=fault.message, log_path=path)
        self._emit(failed)
        why = end.given_up if self._worlds > 1 else ""
        if end.record is None and not path:  # it failed before it had a log
            return RankFailedError(
                f"rank {fault.rank} failed: {fault.message}", why=why, rank=fault.rank, exit_code=fault.exit_code
            )
        ending = Ending(fault.rank, fault.exit_code, time.time(), path, end.record)
        return failure_error(ending, fault.host, crash_dump(path) if path else "", message=fault.message, why=why)

    def close(self, status: str) -> None:
        if self._worlds > 1:
            self._report.ended(time.monotonic(), status, self._reached)
            self._emit(self._report.event(time.time()))
        self._mirror.close()

    def _begin(self, attempt: int) -> None:
        size = len(ranks_of(self._folder(attempt)))
        if self._attempt >= 0 and self._end is None:
            self._read_end()
        if self._attempt >= 0 and self._end is None:  # no fault: Ray has places for another number of ranks
            ranks = f"{size} rank{'s' * (size > 1)}" if size else "another number of ranks"
            text = f"Ray continues with {ranks} instead of {self._world_size}"
            self._report_end(Fault("resize", -1, "", self._reached, text))
        self._attempt, self._next, self._end = attempt, attempt + 1, None
        self._world_size, self._worlds = size, self._worlds + 1
        self._unfollowed = list(range(size))
        self._report.attempt_began(attempt, time.monotonic())
        self._mirror.attempt_began(attempt)
        self._has_warned = False

    def _look_at_attempt(self) -> None:
        folder = self._folder(self._attempt)
        for rank in list(self._unfollowed):
            log_path = folder.log(rank)
            if log_path.exists():
                self._mirror.follow(rank, str(log_path))
                self._unfollowed.remove(rank)
        beat = read_beat(folder.heartbeat(0))
        step = beat.step if beat is not None else 0
        if step > self._reached:
            self._step_at = time.monotonic()
        if self._broke_at is not None:
            self._note_recovery(folder, step)
        self._reached = max(self._reached, step)
        self._read_end()

    def _read_end(self) -> None:
        self._end = AttemptEnd.read(self._folder(self._attempt))
        if self._end is not None:
            self._reached = max(self._reached, self._end.fault.step)
            self._waits_since = time.monotonic()
            if not self._end.given_up:
                self._report_end(self._end.fault)

    def _report_end(self, fault: Fault) -> None:
        self._broke_at = self._step_at
        self._report.fault(self._step_at, fault)
        self._emit(
            AttemptEnded(
                time=time.time(),
                attempt=self._attempt,
                cause=fault.kind,
                message=fault.message,
                rank=fault.rank,
                host=fault.host,
                step=fault.step,
            )
        )

    def _note_recovery(self, folder: AttemptDir, step: int) -> None:
        """The first step after a world broke."""
        try:
            resumed: dict[str, Any] = json.loads(folder.resumed.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        if step <= resumed["step"]:
            return
        now, began = time.monotonic(), self._broke_at
        assert began is not None
        self._broke_at, self._step_at = None, now
        lost = max(0, self._reached - resumed["step"])
        self._report.recovered(now, self._attempt, resumed["step"], lost, resumed["source"])
        self._emit(
            Recovered(
                time=time.time(),
                attempt=self._attempt,
                step=resumed["step"],
                lost_steps=lost,
                source=resumed["source"],
                seconds=now - began,
                world_size=self._world_size,
            )
        )

    def _wait_for_ranks(self) -> None:
        """Ray waits in silence for places that others hold, or for nodes that are gone."""
        if self._has_warned or time.monotonic() < self._waits_since + _PATIENT_S:
            return
        self._has_warned = True
        free = available_resources()  # type: ignore[no-untyped-call]
        there = ", ".join(f"{free.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        message = f"Ray has not placed the ranks yet: {self._placement} needed, free are {there}"
        self._emit(Warned(time=time.time(), message=message))

    def _folder(self, attempt: int) -> AttemptDir:
        return RunDir(self._run_dir).attempt(attempt)

    def _emit(self, event: Event) -> None:
        append_line(self._events, event.to_json())
