"""A look at what an all-reduce costs, from inside any script: under any launcher, or in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from distributed.comm.collectives.moves import barrier
from distributed.comm.collectives.reductions import all_reduce
from distributed.core.choices import Device
from distributed.core.collectives import choose_collectives
from distributed.core.env import WorkerEnv, worker_env
from distributed.runtime.session import Session

SIZES = (1024, 10240, 102400, 1024000)
_CALLS = 10
_TIMEOUT_S = 300.0


class CommunicationTime(NamedTuple):
    """Of all-reduces of one size: the median, and the bytes that a ring sends and receives, by it."""

    size: int  # float32 numbers
    seconds: float
    mb_per_second: float  # 2**20 bytes; 0 in a single process

    def __str__(self) -> str:
        return f"Size: {self.size}, Time: {self.seconds:.6f}s, Bandwidth: {self.mb_per_second:.2f} MB/s"


def profile_communication(sizes: Sequence[int] = SIZES) -> list[CommunicationTime]:
    """Time all-reduces of these numbers of float32; rank 0 prints a line for each, all ranks return the rows.

    A process that a launcher started and that has no process group joins one. A single process sends nothing.

    >>> [row.size for row in profile_communication([16])]
    Size: 16, Time: ...s, Bandwidth: ... MB/s
    [16]
    """
    device = _join()
    rows = [_measure(size, device) for size in sizes]
    if not dist.is_initialized() or dist.get_rank() == 0:
        for row in rows:
            print(row, flush=True)
    return rows


def _join() -> torch.device:
    """The device of this rank, in the group that there is, or in the launcher's world."""
    env = worker_env() or WorkerEnv()
    if dist.is_initialized():
        is_gpu = "nccl" in str(dist.get_backend_config())
        return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    gpus = torch.cuda.device_count()
    kind: Device = "cuda" if gpus else "cpu"
    shares = 0 < gpus < env.local_world_size
    collectives, _ = choose_collectives(kind)
    return Session.open(env, device=kind, collectives=collectives, timeout_s=_TIMEOUT_S, shares_gpus=shares).device


def _measure(size: int, device: torch.device) -> CommunicationTime:
    tensor = torch.zeros(size, device=device)
    seconds: list[float] = []
    for number in range(_CALLS + 1):  # the first makes connections
        barrier(name="profile_communication")
        begun = time.perf_counter()
        all_reduce(tensor, name="profile_communication")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            seconds.append(time.perf_counter() - begun)
    slowest = torch.tensor(sorted(seconds)[len(seconds) // 2], dtype=torch.float64, device=device)
    taken = float(all_reduce(slowest, "max", name="profile_communication"))
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return CommunicationTime(size, taken, 0.0 if is_alone else size * 4 * 2 / taken / 2**20)
