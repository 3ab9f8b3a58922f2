"""What supervision costs while nothing breaks: the CPU time of the processes that watch, and of a rank's own part."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat
from statistics import median

import psutil
import torch

from distributed.bench.recovery.runs import BenchRun
from distributed.core.env import WorkerEnv
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.session import Session
from distributed.runtime.shutdown import StopRequest
from distributed.strategies.compute_clock import ComputeClock
from distributed.train.stragglers.pace import Pace

_CALLS = 2000
_REPEATS = 15  # the quickest counts: what else runs here only adds


@dataclass(frozen=True)
class Supervision:
    """Of one undisturbed run."""

    side: str
    seconds: float
    steps: int
    step_s: float  # median
    cpu_s: dict[str, float]  # user and system time by process

    @property
    def part(self) -> float:
        """Of a core; as well of a step's time, however long steps are, since the watching goes by the clock."""
        return sum(self.cpu_s.values()) / self.seconds

    @property
    def us_per_step(self) -> float:
        return sum(self.cpu_s.values()) / self.steps * 1e6


def watch_supervisors(run: BenchRun, steps: int) -> Supervision:
    """Let a run make that many steps, and measure what its other processes used meanwhile."""
    run.await_steps(20)
    names = run.supervisors()
    before = {pid: _cpu_s(pid) for pid in names}
    begun, first = time.monotonic(), len(run.logs[0])
    run.await_steps(steps)
    seconds = time.monotonic() - begun
    used = {name: _cpu_s(pid) - before[pid] for pid, name in names.items()}
    made = run.logs[0][first:]
    step_s = median(after.time_ns - step.time_ns for step, after in pairwise(made)) / 1e9
    return Supervision(run.side, seconds, len(made), step_s, used)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure_in_rank(folder: str) -> dict[str, float]:
    """µs a step of each thing that a rank does in every step so that it can be watched and replaced."""
    session = Session(WorkerEnv(rank=0, world_size=2), torch.device("cpu"), None)
    heartbeat, stop = Heartbeat(folder, 0), StopRequest(0, 2)
    pace = Pace(0, 2, ComputeClock(session.device))
    steps = range(_CALLS)
    empty = _us(lambda: iter(steps))
    costs = {
        "heartbeat": _us(lambda: map(heartbeat.beat, steps)),
        "seeds": _us(lambda: map(session.seed_step, repeat(0), steps)),
        "pace": _us(lambda: pace.timed(steps)),
        "stop": _us(lambda: map(stop.due, steps)),
    }
    heartbeat.close()
    return {name: max(0.0, cost - empty) for name, cost in costs.items()}


def _us(calls: Callable[[], Iterator[object]]) -> float:
    """CPU µs of one of `_CALLS` calls."""
    taken = []
    for _ in range(_REPEATS):
        begun = time.thread_time_ns()
        deque(calls(), maxlen=0)
        taken.append(time.thread_time_ns() - begun)
    return min(taken) / _CALLS / 1e3
