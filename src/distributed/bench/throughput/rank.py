"""A rank of the throughput benchmark: it imports one contender, and then trains what each turn asks for."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import traceback
from typing import Any

import torch
import torch.distributed as dist

from distributed.bench.interleave import answer, answering
from distributed.bench.throughput.job import WorkloadJob
from distributed.core.env import WorkerEnv, withdraw, worker_env
from distributed.core.registry import load_target


def main() -> None:
    """`python -m distributed.bench.throughput.rank CONTENDER MODULE:FUNCTION DEVICE PORT`, by the benchmark."""
    name, target, kind, port = *sys.argv[1:4], int(sys.argv[4])
    env = worker_env() or WorkerEnv()
    device = torch.device(kind, env.local_rank) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if env.world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    else:  # as if started alone: a trainer that finds a world of one makes a group of it, and its model pays for that
        withdraw(env.to_environ())
    train = load_target(target)
    with tempfile.TemporaryDirectory() as scratch, answering(port, env.rank) as channel:
        for line in channel:
            order = json.loads(line)
            tells_start = order.pop("tells_start")
            place = os.path.join(scratch, name)
            answer(channel, _take_turn(train, WorkloadJob(**order, **_who(env, device), scratch=place), tells_start))
    if dist.is_initialized():
        dist.destroy_process_group()


def _who(env: WorkerEnv, device: torch.device) -> dict[str, Any]:
    return {"rank": env.rank, "ranks": env.world_size, "device": device}


def _take_turn(train: Any, job: WorkloadJob, tells_start: bool) -> dict[str, Any]:
    """One process that fails says why and is ready for the next turn; of several, the others would wait for it."""
    try:
        return _measure(train, job, tells_start)
    except Exception as failed:
        if job.ranks > 1:
            raise
        traceback.print_exc()
        return {"failed": f"{type(failed).__name__}: {failed}"[:500]}
    finally:
        _free(job.device)


def _measure(train: Any, job: WorkloadJob, tells_start: bool) -> dict[str, Any]:
    start = job.final_loss(job.make_model()) if tells_start else None
    _free(job.device)
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    if job.ranks > 1:
        dist.barrier()
    model = train(job)
    peak = _peak_bytes(job.device)
    seconds = job.seconds if job.looks else None
    figures = {"seconds": seconds, "peak_gib": peak / 2**30, "threads": torch.get_num_threads()}
    return figures | {"loss": job.final_loss(model), "start_loss": start}


def _peak_bytes(device: torch.device) -> int:
    """Of what was allocated on the device; on a CPU, of the whole process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _free(device: torch.device) -> None:
    """What the last turn held: waiting processes must leave the device to the one whose turn it is."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
