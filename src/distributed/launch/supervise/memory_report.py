"""MemoryReport: how much each rank uses of the GPU on which one ran out of memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distributed.core.protocol.gpu_memory import GpuMemory

_GIB = 2**30


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
