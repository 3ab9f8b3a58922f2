"""MemoryInquiry: if a rank runs out of GPU memory, the others report their use of it before they are ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distributed.core.protocol.gpu_memory import GpuMemory, read_memory
from distributed.core.protocol.rank_protocol import Measure
from distributed.core.run_dir import AttemptDir
from distributed.launch.clock import Clock
from distributed.launch.node.rank_group import RankHandle
from distributed.launch.supervise.first_failure import Ending

_GIB = 2**30


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


def describe_memory(rank: int, reported: Sequence[GpuMemory]) -> str:
    """The use of the GPU on which this rank has most memory; empty if the rank reported nothing.

    >>> reported = [GpuMemory(0, 11, "a", "H200", 100 * _GIB, _GIB, 60 * _GIB, 61 * _GIB, 60 * _GIB),
    ...         GpuMemory(1, 12, "a", "H200", 100 * _GIB, _GIB, 35 * _GIB, 36 * _GIB, 35 * _GIB)]
    >>> print(describe_memory(1, reported))
    memory of its GPU (H200, 100.0 GiB, 1.0 free), which ranks 0, 1 share:
      rank 0 (pid 11): 60.0 GiB in tensors, 61.0 reserved, at most 60.0 in tensors
      rank 1 (pid 12): 35.0 GiB in tensors, 36.0 reserved, at most 35.0 in tensors
      contexts, NCCL and other programs: 2.0 GiB
    """
    own = max((share for share in reported if share.rank == rank), key=lambda share: share.reserved, default=None)
    if own is None:
        return ""
    shares = sorted((share for share in reported if share.gpu == own.gpu), key=lambda share: share.rank)
    ranks = ", ".join(str(share.rank) for share in shares)
    free = f", {_gib(own.free)} free" if own.free >= 0 else ""
    head = f"memory of its GPU ({own.name}, {_gib(own.total)} GiB{free})"
    lines = [f"{head}, which ranks {ranks} share:" if len(shares) > 1 else f"{head}:"]
    lines += [
        f"  rank {share.rank} (pid {share.pid}): {_gib(share.allocated)} GiB in tensors,"
        f" {_gib(share.reserved)} reserved, at most {_gib(share.peak)} in tensors"
        for share in shares
    ]
    if own.free >= 0:
        rest = own.total - own.free - sum(share.reserved for share in shares)
        lines.append(f"  contexts, NCCL and other programs: {_gib(max(0, rest))} GiB")
    return "\n".join(lines)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f}"
