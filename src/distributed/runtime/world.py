"""How a rank comes into its world and leaves it: the store where all meet, its device, the process group at the end."""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distributed.core.engines.launchers import launcher_of
from distributed.core.env import WorkerEnv, announce, announce_unset
from distributed.core.errors import LaunchError, PlanError
from distributed.runtime.abort.nccl import forget_groups, has_nccl
from distributed.runtime.rank_store import RankStore
from distributed.runtime.torch_compat import default_group, reset_group_count

MESH_S = 15.0  # for ranks that are all there to connect; gloo does not notice that one of them has died since
_CONNECT_S = 2.0  # for one try to reach the store of a rank 0 that listens
_KEEP_GROUP_S = 5.0  # for which a broken process group is kept at least
_KEPT_GROUPS, _KEPT_CONNECTIONS = 16, 256  # older ones are kept up to these numbers, in threads and in open files


class CollectiveError(RuntimeError):
    """A collective failed: says which one, of which rank."""

    collateral = True  # a peer was lost: the cause is what ended it, not the rank that noticed


class _World:
    """What this process keeps of the worlds that it was in."""

    sessions = -1  # opened on the present store
    broken: list[tuple[float, Any]] = []  # noqa: RUF012 - one a process, like torch's default group


def next_session(*, new: bool = False) -> int:
    """The number of a session on its store, so that a second `fit` does not read the first one's keys."""
    _World.sessions = 0 if new else _World.sessions + 1
    return _World.sessions


def meet(
    env: WorkerEnv, timeout_s: float, is_over: Callable[[], bool], listener: socket.socket | None
) -> tuple[dist.Store, int, int]:
    """The store through which the ranks find each other."""
    if env.launcher == "torchrun":
        store, rank, world_size = next(iter(dist.rendezvous("env://", env.rank, env.world_size)))
        return store, rank, world_size
    if env.store is not None:
        return RankStore(env.store, env.attempt, timeout_s), env.rank, env.world_size
    if env.is_main and listener is None:
        listener = _loopback_listener(env)
    waits_briefly = not env.is_main and launcher_of(env.launcher).regroups
    deadline = time.monotonic() + timeout_s
    while True:
        if waits_briefly:
            _await_listener(env, timeout_s, is_over)
        try:
            store = dist.TCPStore(
                env.master_addr,
                env.master_port,
                env.world_size,
                env.is_main,
                timeout=timedelta(seconds=_CONNECT_S if waits_briefly else timeout_s),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except dist.DistError:  # rank 0 may have gone since it listened, and with it this world
            if not waits_briefly or time.monotonic() > deadline:
                raise
            continue
        store.set_timeout(timedelta(seconds=timeout_s))
        return store, env.rank, env.world_size


def _loopback_listener(env: WorkerEnv) -> socket.socket | None:
    """Where all ranks are on this machine: torch's store would listen on all of its addresses."""
    try:
        if env.num_nodes > 1 or not ipaddress.ip_address(env.master_addr).is_loopback:
            return None
        family = socket.AF_INET6 if ":" in env.master_addr else socket.AF_INET
        return socket.create_server((env.master_addr, env.master_port), family=family, backlog=1024)
    except (OSError, ValueError):  # taken, or a name: torch says so, or knows what to do with it
        return None


def await_all(store: dist.Store, env: WorkerEnv, timeout_s: float, is_over: Callable[[], bool]) -> None:
    """Until every rank has come to the store: a wait that can be ended, and that knows who is missing."""
    deadline, pause = time.monotonic() + timeout_s, 0.002
    most_pause = max(0.05, env.world_size / 10_000)  # so that the store has at most 20,000 looks a second to answer
    store.set(f"here/{env.rank}", "")
    if store.add("here", 1) == env.world_size:
        store.set("all-here", "")
    while not store.check(["all-here"]):
        if is_over():
            raise CollectiveError(f"[r{env.rank}] the world ended while its ranks met")
        if time.monotonic() > deadline:
            missing = [rank for rank in range(env.world_size) if not store.check([f"here/{rank}"])]
            if not missing:
                return
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}"
            raise LaunchError(
                f"{who} did not come within {timeout_s:.0f} s",
                why=f"rank {env.rank} and {env.world_size - len(missing) - 1} others wait for them",
                do="see their logs; if they only need longer before `fit`, set collective_timeout_s",
            )
        time.sleep(pause)
        pause = min(most_pause, pause * 1.5)


def _await_listener(env: WorkerEnv, timeout_s: float, is_over: Callable[[], bool]) -> None:
    """Until rank 0 listens: a client of the store that finds no listener waits up to a second before it retries."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if is_over():
            raise CollectiveError(f"[r{env.rank}] the world ended while its ranks met")
        try:
            socket.create_connection((env.master_addr, env.master_port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.005)


def abandon_world() -> None:
    """Leave a process group that is broken, so that another can be joined.

    The group itself lives on: its destructor waits for threads that may wait for the interpreter, which the destructor
    holds, and this rank would stand still for good. One is freed when many have broken since, and its threads are idle.
    """
    if has_nccl():
        forget_groups()
    elif dist.is_initialized():
        now = time.monotonic()
        most = max(1, min(_KEPT_GROUPS, _KEPT_CONNECTIONS // dist.get_world_size()))
        old = _World.broken[:-most] if len(_World.broken) > most else []
        kept = [(since, group) for since, group in old if now - since < _KEEP_GROUP_S]
        _World.broken = [*kept, *_World.broken[len(old) :], (now, default_group())]
        dist.destroy_process_group()
    else:  # torch counts groups by which the ranks name them, also one that broke while it was made
        reset_group_count()
    gc.collect()


def leave_world() -> None:
    """End the process group, and with it the threads of its collectives.

    An object that still holds the group (DDP does, in a cycle) would keep them alive into the interpreter's end, where
    a thread that frees a tensor aborts a process that has done its work.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def be_a_host_of_its_own(env: WorkerEnv) -> None:
    """NCCL refuses two ranks of one host on one GPU. Taken for hosts with a GPU each, they talk over sockets."""
    # Of this process, not of its rank: a world that comes after this one may have another process in its place.
    announce({"NCCL_HOSTID": f"{socket.gethostname()}-{os.getpid()}-rank-{env.rank}"})
    if env.num_nodes == 1:
        announce_unset({"NCCL_SOCKET_IFNAME": "lo"})


def choose_device(kind: str, local_rank: int, shares_gpus: bool = False) -> torch.device:
    if kind != "cuda":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 or (gpus and shares_gpus):  # Slurm may show each rank its own GPU only
        local_rank %= gpus
    if local_rank >= gpus:
        share = "share_gpus=true (--share-gpus) to try more ranks on fewer GPUs, " if gpus else ""
        raise PlanError(
            f"local rank {local_rank} has no GPU: this process sees {gpus}",
            why="each rank of a node takes the GPU of its local rank",
            do=f"start at most as many ranks a node as it has GPUs, set {share}or set device=cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def check_collectives(name: str) -> None:
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    if not available[name]:
        have = [other for other, there in available.items() if there]
        raise PlanError(
            f"communication_backend={name!r} is not in this build of torch",
            why=f"torch was compiled with {', '.join(have)}",
            do=f"set communication_backend={have[0]!r}" + (" (it works under mpirun too)" if name == "mpi" else ""),
        )


def backends(name: str) -> str:
    """NCCL moves GPU tensors only, so CPU tensors keep gloo beside it."""
    return "cpu:gloo,cuda:nccl" if name == "nccl" else name
