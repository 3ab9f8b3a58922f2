"""MemoryInquiry: if a rank runs out of GPU memory, the other ranks report their use before they are ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distributed.core.protocol.gpu_memory import read_memory
from distributed.core.protocol.rank_protocol import Measure
from distributed.core.run_dir import AttemptDir
from distributed.launch.clock import Clock
from distributed.launch.node.rank_group import RankHandle
from distributed.launch.supervise.first_failure import Ending
from distributed.launch.supervise.memory_report import describe_memory


class MemoryInquiry:
    """Call `look` often, because the other ranks end soon after the failure; it never waits."""

    def __init__(self, members: Sequence[RankHandle], clock: Clock, patience_s: float) -> None:
        self._members, self._clock, self._patience_s = members, clock, patience_s
        self._asked: dict[int, list[Path]] = {}  # by the rank that failed: the report files of the others
        self._asked_at = 0.0

    def look(self) -> None:
        for member in self._members:
            if member.has_failed and member.rank not in self._asked and _own(member).exists():
                self._ask(member)

    def tell(self, failure: Ending) -> Ending:
        """The failure, with each rank's use of the GPU if the GPU ran out of memory."""
        member = next((member for member in self._members if member.rank == failure.rank), None)
        record, paths = failure.record, self._asked.get(failure.rank)
        if member is None or record is None or failure.is_collateral or paths is None:
            return failure
        while self._clock.monotonic() < self._asked_at + self._patience_s and not all(path.exists() for path in paths):
            self._clock.sleep(0.02)
        own = _own(member)
        usage = describe_memory(failure.rank, [share for path in (own, *paths) for share in read_memory(path)])
        if not usage:
            return failure
        picture = f"picture: {own.with_suffix('.pickle')} (drop it on https://pytorch.org/memory_viz)"
        return replace(failure, record=replace(record, message=f"{record.message}\n{usage}\n{picture}"))

    def _ask(self, failed: RankHandle) -> None:
        others = [member for member in self._members if member is not failed and not member.has_failed]
        self._asked[failed.rank] = [_beside(failed, member) for member in others]
        self._asked_at = self._clock.monotonic()
        for member, path in zip(others, self._asked[failed.rank], strict=True):
            path.unlink(missing_ok=True)
            member.tell(Measure(str(path), member.rank))


def _own(member: RankHandle) -> Path:
    return AttemptDir(member.born_in).memory(member.born_as)


def _beside(failed: RankHandle, other: RankHandle) -> Path:
    return AttemptDir(other.attempt_dir).memory(other.rank, beside=failed.rank)
