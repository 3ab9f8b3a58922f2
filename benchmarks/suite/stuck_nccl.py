"""A stuck rank on NCCL, and one whose GPU fails: seconds until it is named, and until the others are let go.

Two ranks share one GPU, each as a host of its own. In each attempt of one run rank 1 makes one fault: it does not come
to a collective, waits after it, is stopped by a signal, begins another one; runs out of memory, or gets a CUDA error.

python benchmarks/suite/stuck_nccl.py --json benchmarks/suite/stuck-nccl-h200.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from distributed.bench.machine import describe_machine, describe_versions
from distributed.bench.processes import kill_all, start_command
from distributed.core.events import AttemptEnded, Event, EventTail, RankStalled, Recovered

SCRIPT = Path(__file__).with_name("stuck_script.py")
DIFFERS, ERRORS = "differs", ("memory", "cuda")
FAULTS = ("never meets", "never ends", "is stopped", *ERRORS, DIFFERS)
RANK = 1  # which the script breaks
TARGET_S = 5.0  # from the deadline to a name, and from an error to the end of the attempt


@dataclass(frozen=True, kw_only=True)
class Found:
    """What followed one fault, in seconds; None: it did not come."""

    fault: str
    blamed: int | None  # the rank
    is_right: bool  # whether that one was broken; of different collectives, whether both ranks were named with theirs
    named_after_deadline_s: float | None = None  # of a hang, by the supervisor's clock
    named_after_fault_s: float | None = None  # of a hang, deadline and all
    ended_s: float | None  # from the fault to the end of the attempt, in which the others were called off
    left_s: float | None  # from an error until rank 0 was out of its collective; None as well if its process ended
    trains_s: float | None  # from the fault to the first step after it
    told: str


def train(folder: Path, faults: Sequence[str], *, device: str, hang_timeout_s: float, seconds: float) -> int | None:
    """The exit code of a run with these faults; None if it took too long and was killed."""
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", str(SCRIPT), "--run-dir", "run"]
    command += ["--num-gpus", "2", "--device", device, *["--share-gpus"] * (device == "cuda")]
    with (folder / "output.log").open("wb") as output:
        started = start_command(
            [*command, f"hang_timeout_s={hang_timeout_s:g}", "--", "replicated", *faults], str(folder), output
        )
        try:
            return started.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_all(started)


def read_faults(folder: Path, events: Sequence[Event]) -> list[Found]:
    """Each fault that was made, with the events until the next one."""
    lines = [line.rsplit(maxsplit=2) for line in _lines(folder / "faults")]
    made = [(word, int(attempt), float(at)) for word, attempt, at in lines]
    left = [(int(pid), float(at)) for pid, at in (line.split() for line in _lines(folder / "left"))]
    return [_follow(word, attempt, at, events, left) for word, attempt, at in made]


def _follow(word: str, attempt: int, at: float, events: Sequence[Event], left: list[tuple[int, float]]) -> Found:
    ended = next((e for e in events if isinstance(e, AttemptEnded) and e.attempt == attempt), None)
    again = next((e for e in events if isinstance(e, Recovered) and e.attempt > attempt), None)
    is_hang = word not in ERRORS
    until = ended.time if ended is not None else float("inf")
    stalls = [e for e in events if isinstance(e, RankStalled) and at < e.time <= until]
    stall = stalls[0] if is_hang and stalls else None
    told: RankStalled | AttemptEnded | None = stall if is_hang else ended
    where = stall.where if stall else ended.message.partition("\n")[0] if ended else ""
    return Found(
        fault=word,
        blamed=told.rank if told else None,
        is_right=told is not None and (told.rank == RANK or (word == DIFFERS and "rank 0 in" in where)),
        named_after_deadline_s=_rounded(stall.late_seconds - stall.deadline_seconds) if stall else None,
        named_after_fault_s=_rounded(stall.time - at) if stall else None,
        ended_s=_rounded(ended.time - at) if ended else None,
        left_s=None if is_hang else _left(at, left),
        trains_s=_rounded(again.time - at) if again else None,
        told=where,
    )


def _left(at: float, left: list[tuple[int, float]]) -> float | None:
    """Until the process that was in a collective left it.

    >>> _left(2.0, [(7, 1.0), (7, 2.5), (8, 9.0)]), _left(2.0, [(7, 1.0), (8, 9.0)])
    (0.5, None)
    """
    for (before, last), (pid, moment) in pairwise(left):
        if last <= at < moment:
            return _rounded(moment - at) if pid == before else None
    return None


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def record(
    found: Sequence[Found], faults: Sequence[str], code: int | None, device: str, **settings: Any
) -> dict[str, Any]:
    named = [f.named_after_deadline_s for f in found if f.named_after_deadline_s is not None]
    freed = [f.ended_s for f in found if f.fault in ERRORS and f.ended_s is not None]
    right = sum(f.is_right for f in found)
    maxima = {"named_after_deadline_s": max(named, default=None), "freed_after_error_s": max(freed, default=None)}
    is_whole = right == len(faults) and len(named) + len(freed) == len(faults)
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device == "cuda" else {}
    return {
        "benchmark": "stuck-nccl",
        "unit": "seconds: of a hang from its deadline to the name of the rank, of an error to the end of the attempt",
        "targets": dict.fromkeys(maxima, TARGET_S),
        "machine": describe_machine(),
        "versions": describe_versions() | nccl,
        "settings": {"processes": 2, "device": device, **settings},
        "faults_asked": len(faults),
        "blamed_rightly": right,
        "exit_code": code,
        "faults": [asdict(f) for f in found],
        "max": maxima,
        "passed": code == 0 and is_whole and max(named + freed) <= TARGET_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="how often each fault is made")
    parser.add_argument("--hang-timeout-s", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=100.0, help="after which the run is killed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before, faults = os.getloadavg()[0], [*FAULTS] * asked.rounds
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        code = train(folder, faults, device=asked.device, hang_timeout_s=asked.hang_timeout_s, seconds=asked.seconds)
        events = EventTail(folder / "run" / "events.jsonl", from_end=False).read()
        found = read_faults(folder, events)
        if code != 0:
            print(*_lines(folder / "output.log")[-30:], sep="\n")
    made = record(found, faults, code, asked.device, hang_timeout_s=asked.hang_timeout_s)
    made["load_average"] = {"before": before, "after": os.getloadavg()[0]}
    for f in found:
        print(json.dumps(asdict(f)))
    print(json.dumps({key: made[key] for key in ("max", "blamed_rightly", "faults_asked", "exit_code", "passed")}))
    if asked.json:
        asked.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
