"""Test tools for users' own tasks: run a function on N real ranks on gloo or NCCL, and get what each returns."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from distributed.core.env import worker_env
from distributed.launch.local import LocalLauncher
from distributed.launch.request import LaunchRequest
from distributed.runtime.session import Session, leave_world


class _Lines:
    """Passes the ranks' output on to whoever captures ours."""

    def rank_line(self, rank: int, text: str) -> None:
        print(f"[r{rank}] {text}", flush=True)

    def attempt_began(self, attempt: int) -> None:
        pass

    def refresh(self) -> None:
        pass


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu") -> list[Any]:
    """Call `function(*args)` on every rank of a new world of real processes; returns their results in order of rank.

    The function and its arguments are sent by value. A rank that fails raises RankFailedError here, with its traceback.
    With device="cuda" the ranks are joined by NCCL, and share the GPUs where there are fewer than ranks.

    >>> def total():
    ...     import torch, torch.distributed as dist
    ...     value = torch.ones(1)
    ...     dist.all_reduce(value)
    ...     return value.item()
    >>> run_ranks(total, 2)
    [2.0, 2.0]
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "call").write_bytes(cloudpickle.dumps((sys.path, device, cloudpickle.dumps((function, args)))))
        cores = os.cpu_count() or 1
        request = LaunchRequest(
            command=("-m", "distributed.testing", folder),
            run_dir=str(work / "run"),
            ranks_per_node=world_size,
            threads_per_rank=max(1, cores // world_size),
            device=device,
            shares_gpus=device != "cpu",
        )
        LocalLauncher().run(request, _Lines())
        return [cloudpickle.loads((work / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _main(folder: Path) -> None:
    env = worker_env()
    assert env is not None
    sys.path[:], device, call = cloudpickle.loads((folder / "call").read_bytes())
    function, args = cloudpickle.loads(call)
    collectives, shares = ("gloo", False) if device == "cpu" else ("nccl", torch.cuda.device_count() < env.world_size)
    Session.open(env, device=device, collectives=collectives, timeout_s=120, shares_gpus=shares)
    result = function(*args)
    (folder / f"result-{env.rank}").write_bytes(cloudpickle.dumps(result))
    if dist.is_initialized():
        dist.barrier()
    leave_world()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
