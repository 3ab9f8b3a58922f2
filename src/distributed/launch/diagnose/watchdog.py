"""What NCCL's watchdogs of all ranks say together: which rank is missing from a collective, or behind the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed.launch.diagnose.lines import LogLine

_TIMEOUT = re.compile(
    r"\[Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
)
_QUEUE = re.compile(r"Rank (\d+)\].*last enqueued NCCL work: (-?\d+), last completed NCCL work: (-?\d+)")


@dataclass(frozen=True)
class Waits:
    """Whom the ranks waited for when their collectives timed out."""

    missing: Sequence[int] = ()  # that were not in the collective
    notes: Sequence[str] = ()


def find_missing(lines: Mapping[int | None, Sequence[LogLine]]) -> Waits:
    """Nothing where no watchdog has spoken."""
    waiting: dict[int, tuple[int, str]] = {}
    enqueued: dict[int, int] = {}
    for owner, own in lines.items():
        for line in own:
            if "NCCL" not in line.text:
                continue
            timeout, queue = _TIMEOUT.search(line.text), _QUEUE.search(line.text)
            # A sub-group has numbers of its own: the launcher's prefix says which rank of the whole world it is.
            if timeout is not None:
                waiting.setdefault(int(timeout[1]) if owner is None else owner, (int(timeout[2]), timeout[3]))
            if queue is not None:
                enqueued.setdefault(int(queue[1]) if owner is None else owner, int(queue[2]))
    if not waiting:
        return Waits()
    number, kind = max(waiting.values())
    missing = sorted({rank for rank in lines if rank is not None} - set(waiting))
    notes = []
    if missing:
        notes.append(f"{name_ranks(missing)} did not wait in {kind} number {number}, in which the others timed out")
    least, most = min(enqueued.values(), default=0), max(enqueued.values(), default=0)
    if least < most:
        behind = sorted(rank for rank, count in enqueued.items() if count == least)
        notes.append(f"{name_ranks(behind)} had enqueued {least} collectives, others {most}: behind, or on another way")
        missing = missing or behind
    return Waits(missing, notes)


def name_ranks(ranks: Sequence[int]) -> str:
    """
    >>> name_ranks([0, 1, 2, 5]), name_ranks([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
