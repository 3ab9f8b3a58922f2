"""Whether a run on Ray restarts after a fault: our policy, called where Ray handles the fault, in its controller.

Ray starts the ranks again, with as many as have a place. What it cannot know is that a program which fails in the same
way at the same step will do so for ever; then this raises, which ends the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ray.experimental import internal_kv
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

from distributed.core.atomic import write_private
from distributed.core.errors import DistributedError
from distributed.core.protocol.failure import FailureRecord
from distributed.core.protocol.heartbeat import read_beat
from distributed.core.run_dir import AttemptDir, RunDir
from distributed.engines.ray.names import NAMESPACE, stop_key
from distributed.launch.preflight import next_attempt
from distributed.launch.supervise.first_failure import Ending, first_failure
from distributed.launch.supervise.policy import Fault, GiveUp, classify, decide

_GRACE_S = 2.0  # for the rank that failed first to say so, when others only lost their connection


class RunGivenUpError(RuntimeError):
    """Ends a run in Ray's controller; why, the driver reads in the folder of the attempt."""


@dataclass(frozen=True)
class AttemptEnd:
    """What became of one attempt, as a file in its folder."""

    fault: Fault
    given_up: str = ""  # why; "": the run restarts
    log_path: str = ""
    record: FailureRecord | None = None

    def write(self, attempt_dir: AttemptDir) -> None:
        attempt_dir.path.mkdir(parents=True, exist_ok=True)
        write_private(attempt_dir.ended, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(attempt_dir: AttemptDir) -> AttemptEnd | None:
        try:
            raw = json.loads(attempt_dir.ended.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        record = FailureRecord(**raw["record"]) if raw["record"] is not None else None
        return AttemptEnd(Fault(**raw["fault"]), raw["given_up"], raw["log_path"], record)


class RayVerdict(WorkerGroupCallback):  # type: ignore[misc]
    """Asked by Ray's controller after every failure of its workers. Each group of workers is an attempt of the run."""

    def __init__(self, run: str, run_dir: str, max_restarts: int | None, first_attempt: int) -> None:
        self._run, self._run_dir, self._max_restarts = run, run_dir, max_restarts
        self._faults: list[Fault] = []
        self._first_attempt = self._attempt = first_attempt
        self._reached, self._is_judged = 0, False
        self._uses_trainer = False

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Its number is the one that rank 0 will find, also where the workers end before there is a rank 0."""
        self._attempt, self._is_judged = attempt_to_come(self._run_dir, self._first_attempt), False

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        # Ray asks again while it waits for a node that is being taken away.
        if worker_group_status.errors and not self._is_judged:
            self._is_judged = True
            self._judge(worker_group_status.errors)

    def _judge(self, worker_exceptions: Mapping[int, Exception]) -> None:
        folder = RunDir(self._run_dir).attempt(self._attempt)
        self._look_at_steps(folder)
        end = self._blame(folder, worker_exceptions)
        self._faults.append(end.fault)
        end = replace(end, given_up=self._why_give_up())
        end.write(folder)
        if end.given_up:
            raise RunGivenUpError(end.given_up)

    def _look_at_steps(self, folder: AttemptDir) -> None:
        beats = [beat for rank in ranks_of(folder) if (beat := read_beat(folder.heartbeat(rank))) is not None]
        self._uses_trainer |= bool(beats)
        self._reached = max([self._reached, *(beat.step for beat in beats)])

    def _why_give_up(self) -> str:
        if internal_kv._internal_kv_get(stop_key(self._run), namespace=NAMESPACE) is not None:
            return "it was being stopped"
        verdict = decide(
            self._faults,
            reached=self._reached,
            max_restarts=self._max_restarts,
            uses_trainer=self._uses_trainer,
            min_gpus=1,
            gpus=1,  # which places a run has is Ray's to decide
        )
        return verdict.reason if isinstance(verdict, GiveUp) else ""

    def _blame(self, folder: AttemptDir, exceptions: Mapping[int, Exception]) -> AttemptEnd:
        """Who failed first: a rank that says so, then one that is gone without a word."""
        step = self._reached if self._uses_trainer else -1
        for rank, error in exceptions.items():
            if isinstance(error, DistributedError):  # before it had a log and a place to write its failure
                text = f"{type(error).__name__}: {error}"
                return AttemptEnd(
                    Fault(
                        "code",
                        rank=rank,
                        host=_host(folder, rank),
                        step=step,
                        message=text,
                        traceback=text,
                        exit_code=error.exit_code,
                    )
                )
        deadline = time.monotonic() + _GRACE_S
        while True:
            endings = list(_endings(folder, exceptions))
            first = first_failure(endings)
            if first is not None and not first.is_collateral:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if first is None or first.is_collateral:
            silent = [rank for rank in ranks_of(folder) if rank not in {ending.rank for ending in endings}]
            if silent:
                return _gone(folder, silent[0], step, "its process or its node is gone")
        if first is None:
            return _gone(folder, min(exceptions, default=-1), step, "it failed and left no error")
        if first.record is None:
            return _gone(folder, first.rank, step, _short(exceptions[first.rank]))
        fault = classify(first, step, _host(folder, first.rank), is_alone=first.is_collateral)
        return AttemptEnd(fault, log_path=first.log_path, record=first.record)


def attempt_to_come(run_dir: str, first_attempt: int) -> int:
    """The number of the next attempt of a launch that begins with `first_attempt`."""
    return max(next_attempt(run_dir), first_attempt)


def ranks_of(folder: AttemptDir) -> range:
    """The ranks of an attempt, as far as its first rank has come."""
    try:
        return range(int(json.loads(folder.place(0).read_text())["world_size"]))
    except (OSError, ValueError, KeyError):
        return range(0)


def _endings(folder: AttemptDir, exceptions: Mapping[int, Exception]) -> Iterator[Ending]:
    for rank in sorted({*ranks_of(folder), *exceptions}):
        record, log_path = FailureRecord.read(folder.failure(rank)), str(folder.log(rank))
        if record is not None:
            yield Ending(rank, record.exit_code, record.time, log_path, record)
        elif rank in exceptions:
            yield Ending(rank, 1, time.time(), log_path)


def _gone(folder: AttemptDir, rank: int, step: int, message: str) -> AttemptEnd:
    fault = Fault("machine", rank, _host(folder, rank), step, message)
    return AttemptEnd(fault, log_path=str(folder.log(rank)))


def _host(folder: AttemptDir, rank: int) -> str:
    try:
        return str(json.loads(folder.place(rank).read_text())["host"])
    except (OSError, ValueError, KeyError):
        return ""


def _short(error: Exception) -> str:
    """What Ray says of a worker that is gone, without its advice."""
    inner = getattr(error, "health_check_failure", error)
    return f"its process is gone: killed, or crashed (Ray: {type(inner).__name__})"
