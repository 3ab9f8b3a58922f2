"""Session: one rank joined to its world, with its device, its seed, and collectives that have names and deadlines."""

from __future__ import annotations

import atexit
import gc
import itertools
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distributed.core.env import WorkerEnv
from distributed.core.errors import LaunchError, PlanError

_OPENED = itertools.count()  # sessions of this process, so that a second `fit` does not read the first one's keys


class CollectiveError(RuntimeError):
    """A collective failed: says which one, of which rank."""

    collateral = True  # a peer was lost: whatever ended it is to blame, not the rank that noticed


class Session:
    """This rank's place in the world; `open` joins it."""

    def __init__(self, env: WorkerEnv, device: torch.device, store: dist.Store | None) -> None:
        self.env, self.device, self.store = env, device, store
        self.rank, self.world_size = env.rank, env.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @staticmethod
    def open(env: WorkerEnv, *, device: str, collectives: str, timeout_s: float) -> Session:
        """Join the world, or the process group that the script has already made."""
        chosen = _choose_device(device, env.local_rank)
        if env.world_size == 1 and not dist.is_initialized():
            return Session(env, chosen, None)
        if not dist.is_initialized():
            _check_collectives(collectives)
            try:
                meeting = "env://" if env.launcher == "torchrun" else f"tcp://{env.master_addr}:{env.master_port}"
                store, rank, world_size = next(iter(dist.rendezvous(meeting, env.rank, env.world_size)))
                dist.init_process_group(
                    _backends(collectives),
                    store=dist.PrefixStore("group", store),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout_s),
                    device_id=chosen if chosen.type == "cuda" and collectives == "nccl" else None,
                )
            except dist.DistNetworkError as failed:
                raise LaunchError(
                    f"rank {env.rank} cannot meet the others at {env.master_addr}:{env.master_port}",
                    why=str(failed).splitlines()[0],
                    do="check that the address is rank 0's host and that no other job uses the port (--master-port)",
                ) from failed
            atexit.register(leave_world)
        else:
            store = dist.distributed_c10d._get_default_store()
        return Session(env, chosen, dist.PrefixStore(f"session-{next(_OPENED)}", store))

    def seed(self, seed: int) -> None:
        """Python's, numpy's and torch's generators, a stream of its own for each rank."""
        mixed = (seed + self.rank) % 2**63
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        torch.manual_seed(mixed)

    def sum(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in place."""
        if self.world_size > 1:
            self._named(name, lambda: dist.all_reduce(values))
        return values

    def max(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            self._named(name, lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX))
        return values

    def barrier(self, name: str) -> None:
        """Returns when every rank has come here."""
        self.sum(name, torch.zeros(1, device=self.device))

    def share_text(self, key: str, text: str | None) -> str:
        """A text that rank 0 has and every rank needs."""
        if self.store is None:
            assert text is not None
            return text
        if text is not None:
            self.store.set(f"text/{key}", text)
        return str(self.store.get(f"text/{key}").decode())

    def _named(self, name: str, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except (RuntimeError, dist.DistError) as failed:
            raise CollectiveError(f"[r{self.rank}] in the collective {name!r}: {failed}") from failed


def leave_world() -> None:
    """End the process group, and with it the threads of its collectives.

    Whatever still holds the group (DDP does, in a cycle) would let them live on into the interpreter's end, where a
    thread that frees a tensor aborts a process that has done its work.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _choose_device(kind: str, local_rank: int) -> torch.device:
    if kind != "cuda":
        return torch.device("cpu")
    local_rank = 0 if torch.cuda.device_count() == 1 else local_rank  # Slurm may show each rank its own GPU only
    if local_rank >= torch.cuda.device_count():
        raise PlanError(
            f"local rank {local_rank} has no GPU: this process sees {torch.cuda.device_count()}",
            why="each rank of a node takes the GPU of its local rank",
            do="start at most as many ranks a node as it has GPUs, or set device=cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _check_collectives(name: str) -> None:
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    if not available[name]:
        have = [other for other, there in available.items() if there]
        raise PlanError(
            f"communication_backend={name!r} is not in this build of torch",
            why=f"it was compiled with {', '.join(have)}",
            do=f"set communication_backend={have[0]!r}" + (" (it works under mpirun too)" if name == "mpi" else ""),
        )


def _backends(name: str) -> str:
    """NCCL moves GPU tensors only, so CPU tensors keep gloo beside it."""
    return "cpu:gloo,cuda:nccl" if name == "nccl" else name
