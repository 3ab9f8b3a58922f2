"""A rank of the collectives benchmark: it joins its world once, and then runs the collectives that it is given."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distributed.bench.interleave import answer, answering
from distributed.core.env import WorkerEnv, worker_env


def main() -> None:
    """`python -m distributed.bench.collectives.rank DEVICE PORT`, started by `distributed bench collectives`."""
    kind, port = sys.argv[1], int(sys.argv[2])
    env = worker_env() or WorkerEnv()
    device = torch.device(kind, env.local_rank) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with answering(port, env.rank) as channel:
        for line in channel:
            answer(channel, _measure(device, **json.loads(line)))
    dist.destroy_process_group()


def _measure(device: torch.device, operation: str, size: int, calls: int) -> dict[str, Any]:
    """Seconds a call; a backend without this operation refuses it on all ranks alike."""
    call = _calls(operation, size // 4, device)
    try:
        call()
    except (RuntimeError, NotImplementedError) as refused:
        return {"failed": str(refused).splitlines()[0]}
    dist.barrier()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return {"seconds": (time.perf_counter() - begun) / calls}


def _calls(operation: str, numbers: int, device: torch.device) -> Callable[[], Any]:
    """The operation with its buffers; `numbers` are those of the whole message."""
    ranks = dist.get_world_size()
    own = max(1, numbers // ranks)
    whole, part = torch.zeros(own * ranks, device=device), torch.zeros(own, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[operation]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
