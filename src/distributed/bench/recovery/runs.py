"""A run of either side as the benchmark sees it: a command, the steps that its ranks log, and an end for all of it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import psutil

from distributed.bench.processes import kill_all, start_command
from distributed.bench.recovery import workload
from distributed.core.errors import LaunchError

Side = Literal["ours", "torchrun"]
SIDES: tuple[Side, Side] = ("ours", "torchrun")
START_TIMEOUT_S = 180.0
_LOOK_S = 0.01
_TAIL_LINES = 15  # of what a run said, in an error

T = TypeVar("T")


class TimedStep(NamedTuple):
    time_ns: int  # CLOCK_MONOTONIC
    number: int
    pid: int


class Recovery(NamedTuple):
    seconds: float  # from the kill until every rank has made a step of the new world
    lost_steps: int  # that had been made before, and were made again


def find_recovery(logs: Sequence[Sequence[TimedStep]], rank: int, pid: int, killed_ns: int) -> Recovery | None:
    """What followed the kill of a rank's process; None while its world is not back.

    A survivor may end a step of the old world after the kill. So what counts is the step with which the replacement
    begins, once every rank is beyond it: a rank that made that step twice made it in the new world the second time.

    >>> old = [TimedStep(1, 1, 7), TimedStep(2, 2, 7)]
    >>> marks = (1, 1), (2, 2), (1_000_000_002, 2), (1_000_000_003, 3)
    >>> survivor = [TimedStep(time_ns, number, 8) for time_ns, number in marks]
    >>> find_recovery([[*old, TimedStep(1_000_000_001, 2, 9)], survivor], rank=0, pid=7, killed_ns=2) is None
    True
    >>> new = [TimedStep(1_000_000_001, 2, 9), TimedStep(1_000_000_004, 3, 9)]
    >>> find_recovery([[*old, *new], survivor], rank=0, pid=7, killed_ns=2)
    Recovery(seconds=1.0, lost_steps=1)
    """
    replacement = next((step for step in logs[rank] if step.pid != pid and step.time_ns > killed_ns), None)
    if replacement is None:
        return None
    firsts = []
    for log in logs:
        same = [step.time_ns for step in log if step.number == replacement.number and step.time_ns > killed_ns]
        is_beyond = log[-1].time_ns > replacement.time_ns and log[-1].number > replacement.number
        if not same or not is_beyond:
            return None
        firsts.append(max(same))
    reached = max(step.number for log in logs for step in log if step.time_ns <= killed_ns)
    return Recovery((max(firsts) - killed_ns) / 1e9, max(0, reached - replacement.number + 1))


class BenchRun:
    """One command and everything that it starts; leaving it kills all of that."""

    def __init__(
        self,
        side: Side,
        ranks: int,
        folder: str,
        *,
        settings: Sequence[str] = (),
        device: str = "cpu",
        pace_s: float = workload.PACE_S,
    ) -> None:
        """On `cuda` all ranks share one GPU. `settings` and `pace_s` are of our side alone."""
        self.side, self.ranks, self.folder, self._device, self._pace_s = side, ranks, folder, device, pace_s
        self.run_dir = os.path.join(folder, "run")
        self.logs: list[list[TimedStep]] = [[] for _ in range(ranks)]
        self._offsets = [0] * ranks
        os.makedirs(folder)
        script = os.path.join(folder, "train.py")
        shutil.copy(Path(__file__).with_name(f"script_{side}.py"), script)  # a folder of its own, as a user's has
        self._output = os.path.join(folder, "output.log")
        command = self._command(script, settings)
        # Without it, torchrun's restarts read the addresses of dead peers on gloo, and some of them hang.
        fixed = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if side == "torchrun" else {}
        with open(self._output, "wb") as output:
            self.began_ns = time.monotonic_ns()
            self._launcher = start_command(command, folder, output, fixed)

    def _command(self, script: str, settings: Sequence[str]) -> list[str]:
        if self.side == "ours":
            command = [sys.executable, "-m", "distributed.cli", "train", "--script", script]
            command += ["--num-gpus", str(self.ranks), "--device", self._device, "--run-dir", self.run_dir]
            command += ["--share-gpus"] * (self._device == "cuda")
            return [*command, *settings, "--", self.folder, str(self._pace_s)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"]
        return [*command, f"--nproc-per-node={self.ranks}", script, self.folder, self._device]

    def __enter__(self) -> BenchRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read_steps(self) -> list[list[TimedStep]]:
        """The steps that every rank has logged until now."""
        for rank in range(self.ranks):
            with suppress(FileNotFoundError), open(workload.steps_path(self.folder, rank), "rb") as file:
                file.seek(self._offsets[rank])
                whole = file.read().rpartition(b"\n")[0]
                if whole:
                    self._offsets[rank] += len(whole) + 1
                    self.logs[rank] += [TimedStep(*map(int, line.split())) for line in whole.splitlines()]
        return self.logs

    def await_steps(self, count: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every rank has made that many more."""
        goals = [len(log) + count for log in self.read_steps()]
        done = self.until(
            lambda: all(len(log) >= goal for log, goal in zip(self.logs, goals, strict=True)) or None, timeout_s
        )
        if done is None:
            raise self._error(f"no {count} steps within {timeout_s:.0f} s")

    def until(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `look` finds in the logs; None when time is up or the run has ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended = not self.is_alive
            self.read_steps()
            found = look()
            if found is not None or ended:
                return found
            time.sleep(_LOOK_S)
        return None

    @property
    def is_alive(self) -> bool:
        return self._launcher.poll() is None

    def pid(self, rank: int) -> int:
        return self.read_steps()[rank][-1].pid

    def first_step_s(self) -> float:
        """From the command until every rank has made a step."""
        self.await_steps(1)
        return (max(log[0].time_ns for log in self.logs) - self.began_ns) / 1e9

    def supervisors(self) -> dict[int, str]:
        """The processes of this run that make no steps: the command itself, and those between it and the ranks."""
        pids = {log[-1].pid for log in self.read_steps()}
        children = [child.pid for child in psutil.Process(self._launcher.pid).children() if child.pid not in pids]
        return {self._launcher.pid: "launcher"} | dict.fromkeys(children, "warm parent")

    def end(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Ask it to save and end; its exit code."""
        self._launcher.send_signal(signal.SIGTERM)
        return self._launcher.wait(timeout_s)

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        return self._launcher.wait(timeout_s)

    def close(self) -> None:
        """Kill all of it."""
        kill_all(self._launcher)

    def _error(self, what: str) -> LaunchError:
        said = Path(self._output).read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        code = self._launcher.poll()
        ended = f"; its command ended with exit code {code}" if code is not None else ""
        return LaunchError(f"the run of {self.side} made {what}{ended}", why="\n".join(said) or "it said nothing")
