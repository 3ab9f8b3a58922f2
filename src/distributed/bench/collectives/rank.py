"""A rank of the collectives benchmark: it joins its world once, and then runs what it is given."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from distributed.bench.collectives.operations import make_trial
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
            asked = json.loads(line)
            answer(channel, _measure_pair(device, **asked) if "source" in asked else _measure(device, **asked))
    dist.destroy_process_group()


def _measure(device: torch.device, operation: str, size: int, calls: int, algorithm: str) -> dict[str, Any]:
    """Seconds a call, and wrong numbers of one; a backend without this operation refuses it on all ranks alike."""
    trial = make_trial(operation, size, device, algorithm)
    try:
        wrong = trial.wrong()
    except (RuntimeError, NotImplementedError) as refused:
        return {"failed": str(refused).splitlines()[0]}
    trial.clear()
    dist.barrier()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(calls):
        trial.call()
    _wait(device)
    return {"seconds": (time.perf_counter() - begun) / calls, "wrong": wrong}


def _measure_pair(device: torch.device, source: int, target: int, size: int, calls: int) -> dict[str, Any]:
    """Half of what a message takes there and back; the other ranks stand by."""
    rank, message = dist.get_rank(), torch.zeros(max(1, size // 4), device=device)
    dist.barrier()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(calls):
        if rank == source:
            dist.send(message, target)
            dist.recv(message, target)
        elif rank == target:
            dist.recv(message, source)
            dist.send(message, source)
    _wait(device)
    return {"seconds": (time.perf_counter() - begun) / calls / 2}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
