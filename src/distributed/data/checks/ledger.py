"""The sample ledger: which samples each step used, a compact file a rank, so that exactly-once can be checked later.

A record is written with one call to the kernel, so a rank that is killed leaves whole records. A resumed run first
drops the records of steps that its checkpoint does not have: those steps are taken again.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distributed.core.atomic import FILE_MODE
from distributed.core.errors import DataError
from distributed.core.run_dir import LedgerDir

_HEADER = b"samples1"
_RECORD = struct.Struct("<qqi")  # optimizer step (from 1), epoch, number of samples; then their 64-bit indices


class LedgerEntry(NamedTuple):
    step: int
    epoch: int
    indices: np.ndarray


class Ledger:
    """One rank's file."""

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        path = LedgerDir(folder).file(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        if os.fstat(self._fd).st_size == 0:
            os.write(self._fd, _HEADER)

    def record(self, step: int, epoch: int, indices: Sequence[int]) -> None:
        os.write(self._fd, _RECORD.pack(step, epoch, len(indices)) + np.asarray(indices, dtype="<i8").tobytes())

    def close(self) -> None:
        os.close(self._fd)


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """The whole records of a file; what is torn at its end was not a step."""
    for entry, _ in _scan(path):
        yield entry


def _scan(path: Path) -> Iterator[tuple[LedgerEntry, int]]:
    """Each record and where it ends."""
    raw = path.read_bytes()
    if not raw.startswith(_HEADER):
        raise DataError(
            f"{path} is no sample ledger", why="the file does not begin with the bytes of a ledger", do=f"rm {path}"
        )
    at = len(_HEADER)
    while at + _RECORD.size <= len(raw):
        step, epoch, count = _RECORD.unpack_from(raw, at)
        end = at + _RECORD.size + 8 * count
        if count < 0 or end > len(raw):
            return
        yield LedgerEntry(step, epoch, np.frombuffer(raw, "<i8", count, at + _RECORD.size)), end
        at = end


def rewind_ledgers(folder: str | os.PathLike[str], step: int) -> None:
    """Drop what came after `step` from every rank's file, also of ranks that this run no longer has."""
    for path in LedgerDir(folder).files():
        keep = len(_HEADER)
        for entry, end in _scan(path):
            if entry.step > step:
                break
            keep = end
        os.truncate(path, keep)


def last_recorded(folder: str | os.PathLike[str], rank: int) -> int:
    """The last step in a rank's file; 0 where there is none."""
    path = LedgerDir(folder).file(rank)
    return max((entry.step for entry in read_ledger(path)), default=0) if path.exists() else 0


def complete_ledgers(
    folder: str | os.PathLike[str], step: int, epoch: int, used: Callable[[int], Sequence[int]], *, ranks: int
) -> None:
    """Record the last step of a world that broke for ranks that died before they did; `used`: the samples of a rank."""
    for rank in range(ranks):
        if last_recorded(folder, rank) < step:
            ledger = Ledger(folder, rank)
            ledger.record(step, epoch, used(rank))
            ledger.close()


@dataclass(frozen=True)
class LedgerReport:
    """What the ledgers of all ranks say together."""

    steps: int
    samples: int
    repeated: dict[int, list[int]]  # by epoch: samples that were used more than once
    missing: dict[int, list[int]]  # by epoch: samples that an epoch before the last one never used

    @property
    def is_exact(self) -> bool:
        return not self.repeated and not self.missing

    def __str__(self) -> str:
        if self.is_exact:
            return f"exactly once: {self.samples} samples in {self.steps} steps"
        lost, twice = (sum(map(len, found.values())) for found in (self.missing, self.repeated))
        return f"{lost} samples missing, {twice} repeated in {self.steps} steps"


def check_ledgers(
    folder: str | os.PathLike[str], samples_per_epoch: int, *, finished: bool = True, limit: int | None = None
) -> LedgerReport:
    """Whether every epoch used every sample once; the last one may be unfinished.

    `limit`: as many samples of each epoch, where the run takes no more. Of an epoch that took fewer, all that it did
    not use count as missing.
    """
    used: dict[int, Counter[int]] = {}
    steps: set[int] = set()
    for path in LedgerDir(folder).files():
        for entry in read_ledger(path):
            used.setdefault(entry.epoch, Counter()).update(entry.indices.tolist())
            steps.add(entry.step)
    last = max(used, default=-1)
    everything, due = range(samples_per_epoch), min(limit or samples_per_epoch, samples_per_epoch)
    repeated = {epoch: [i for i, n in counts.items() if n > 1] for epoch, counts in used.items()}
    missing = {
        epoch: [i for i in everything if i not in counts]
        for epoch, counts in used.items()
        if (finished or epoch != last) and len(counts) < due
    }
    return LedgerReport(
        steps=len(steps),
        samples=sum(sum(counts.values()) for counts in used.values()),
        repeated={epoch: found for epoch, found in repeated.items() if found},
        missing={epoch: found for epoch, found in missing.items() if found},
    )
