"""What runs in a worker of Ray Train: the worker becomes a rank, and runs what every other launcher's rank runs."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.collective
from ray.experimental import internal_kv
from ray.train.backend import Backend, BackendConfig

from distributed.core.atomic import write_private
from distributed.core.env import LAUNCHER, WorkerEnv, announce, inherited_environ
from distributed.core.errors import LaunchError
from distributed.core.run_dir import RunDir
from distributed.engines.ray.names import NAMESPACE, RAY_RUN, node_key, stop_key, task_key
from distributed.engines.ray.verdict import attempt_to_come
from distributed.launch.node.rank import main as run_program
from distributed.launch.ports import free_port
from distributed.launch.request import NodeVariables, Roles

_LISTEN_EVERY_S = 0.5
END_AT_ONCE = -signal.SIGKILL  # what the driver sends in place of a signal to stop


@dataclass(frozen=True)
class RankOrder:
    """What the driver gives every rank."""

    run: str  # what it is called in Ray's store
    command: tuple[str, ...]
    run_dir: str
    folder: str  # the driver's working directory
    first_attempt: int
    nominal_ranks: int
    env: Mapping[str, str] = field(default_factory=dict)  # beside its place in the world
    roles: Roles | None = None  # what the ranks are to each other, if that is more than their places
    network: NodeVariables | None = None  # by which the ranks of a node reach the others


class RankEndedError(RuntimeError):
    """How a rank ended, for Ray: what went wrong is in its failure file and its log."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(rank, exit_code)
        self.rank, self.exit_code = rank, exit_code

    def __str__(self) -> str:
        return f"rank {self.rank} ended with exit code {self.exit_code}"


class PlacedRanks(BackendConfig):  # type: ignore[misc]
    """Ray places the processes; the process group is the rank's own, so that any script can make one."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Placed


class _Placed(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # GPUs of a node that see each other exchange directly


def become_rank(order: dict[str, Any]) -> None:
    """The training function of a Ray Train worker."""
    asked = RankOrder(**order)
    _check_paths(asked)
    env = _take_place(asked)
    announce(_variables(asked, env))
    os.chdir(asked.folder)
    _write_to_log(RunDir(asked.run_dir).attempt(env.attempt).log(env.rank))
    _write_place(asked, env)
    is_over = threading.Event()
    target = threading.get_ident()
    threading.Thread(target=_obey, args=(asked.run, env, target, is_over), daemon=True).start()
    try:
        exit_code = run_program(list(asked.command))
    finally:
        is_over.set()
        sys.stdout.flush()
        sys.stderr.flush()
    if exit_code not in (0, 128 + signal.SIGINT):
        raise RankEndedError(env.rank, exit_code)


def _check_paths(order: RankOrder) -> None:
    """Nothing is sent to the nodes of a cluster: they must see what the driver sees."""
    script = order.command[0]
    needed = {"run directory": order.run_dir, "working directory": order.folder}
    if script != "-m":
        needed["script"] = os.path.join(order.folder, script)
    missing = [f"the {name} {path}" for name, path in needed.items() if not os.path.exists(path)]
    if missing:
        raise LaunchError(
            f"node {socket.gethostname()} does not see {' and '.join(missing)}",
            why="the ranks of a Ray cluster read and write the same files as the process that starts them",
            do="keep them on storage that all nodes mount at the same path (set run_dir, start from a folder there)",
        )


def _take_place(order: RankOrder) -> WorkerEnv:
    """Rank 0 publishes the rendezvous and the number of the attempt; the nodes are counted in Ray's store."""
    context = ray.train.get_context()
    rank, node = context.get_world_rank(), context.get_node_rank()
    rendezvous = None
    if rank == 0:
        attempt = attempt_to_come(order.run_dir, order.first_attempt)
        RunDir(order.run_dir).attempt(attempt).path.mkdir(parents=True)
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        rendezvous = {"attempt": attempt, "address": address, "port": free_port()}
    rendezvous = ray.train.collective.broadcast_from_rank_zero(rendezvous)
    attempt = rendezvous["attempt"]
    internal_kv._internal_kv_put(node_key(order.run, attempt, node), b"", namespace=NAMESPACE)
    ray.train.collective.barrier()
    nodes = internal_kv._internal_kv_list(node_key(order.run, attempt, ""), namespace=NAMESPACE)
    return WorkerEnv(
        rank=rank,
        local_rank=context.get_local_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        node_rank=node,
        num_nodes=len(nodes),
        master_addr=rendezvous["address"],
        master_port=rendezvous["port"],
        launcher="ray",
        run_dir=order.run_dir,
        attempt=attempt,
        restarts=attempt - order.first_attempt,
        nominal_ranks=order.nominal_ranks,
    )


def _variables(order: RankOrder, env: WorkerEnv) -> dict[str, str]:
    roles = {} if order.roles is None else order.roles.placed(_addresses(order, env), env.rank)
    network: Mapping[str, str] = {}
    if order.network is not None:
        network = order.network(inherited_environ(), towards=env.master_addr, nodes=env.num_nodes)
    return env.to_environ() | {LAUNCHER: "ray", RAY_RUN: order.run} | dict(network) | dict(roles) | dict(order.env)


def _addresses(order: RankOrder, env: WorkerEnv) -> list[str]:
    """Where each rank may listen: a free port of its own node, which the ranks tell each other in Ray's store."""
    own = f"{ray.util.get_node_ip_address()}:{free_port()}"  # type: ignore[no-untyped-call]
    keys = [task_key(order.run, env.attempt, rank) for rank in range(env.world_size)]
    internal_kv._internal_kv_put(keys[env.rank], own.encode(), namespace=NAMESPACE)
    ray.train.collective.barrier()
    return [internal_kv._internal_kv_get(key, namespace=NAMESPACE).decode() for key in keys]


def _write_to_log(path: Path) -> None:
    """What this process prints from here on, also from C, goes to its log in the run directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as log:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log.fileno(), number)
    how: Any = {"mode": "w", "buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout, sys.stderr = open(1, **how), open(2, **how)  # noqa: SIM115 - as long as the process


def _write_place(order: RankOrder, env: WorkerEnv) -> None:
    """Where this rank runs, for the driver, which may have to say who is gone."""
    path = RunDir(order.run_dir).attempt(env.attempt).place(env.rank)
    about = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()} | asdict(env)
    write_private(path, json.dumps(about) + "\n")


def _obey(run: str, env: WorkerEnv, thread: int, is_over: threading.Event) -> None:
    """A request to stop, for a program that is not in our loop, which hears it itself: KeyboardInterrupt, as anywhere.

    This thread of a worker gets no signals, so the exception is raised in it from here.
    """
    beat = RunDir(env.run_dir).attempt(env.attempt).heartbeat(env.rank)
    is_reported = False
    while not is_over.wait(_LISTEN_EVERY_S):
        asked = internal_kv._internal_kv_get(stop_key(run), namespace=NAMESPACE)
        if asked is not None and int(asked) == END_AT_ONCE:
            os._exit(128 + signal.SIGKILL)
        if asked is not None and not is_reported and not beat.exists():
            is_reported = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
