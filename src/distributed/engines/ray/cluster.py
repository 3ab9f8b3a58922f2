"""A Ray cluster: connecting to one, or starting one for a single run, and what it has to give."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from distributed.core.env import environ_with, inherited_environ
from distributed.core.errors import LaunchError, Problem

_ANSWER_S = 4.0  # for the port of a cluster, and again for the service that listens there
_JOIN_S = 60.0  # for a cluster that has answered to let us in
_SETTINGS = 4  # the kind of the frame that an HTTP/2 connection begins with
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_CLIENT = "ray://"
_START = "start one with: ray start --head"
# What Ray reports to others and on our console; a variable that is set already is kept.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SCHEDULER_EVENTS": "0", "RAY_DEDUP_LOGS": "0"}
# A cluster for one run: no workers that wait for other work, and no autoscaler that removes its node.
_PRIVATE = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


@dataclass(frozen=True)
class RayNode:
    """One machine of a cluster, and what Ray may place on it."""

    host: str
    cpus: float
    gpus: float

    def slots(self, device: str) -> int:
        """Ranks that it can hold: a rank takes a CPU, and a GPU on CUDA."""
        return int(min(self.cpus, self.gpus) if device == "cuda" else self.cpus)

    def __str__(self) -> str:
        return f"{self.host} ({self.cpus:g} CPUs, {self.gpus:g} GPUs)"


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process is connected to."""

    nodes: tuple[RayNode, ...]
    grows_to: dict[str, float] | None = None  # with an autoscaler: the most that there can be
    is_private: bool = False

    def slots(self, device: str) -> int:
        return sum(node.slots(device) for node in self.nodes)


@dataclass(frozen=True)
class PlacementRequest:
    """The ranks of a run: `fewest` must have a place now."""

    device: str
    fewest: int
    most: int
    num_nodes: int = 1
    per_node: int | None = None  # None: wherever there is room

    @property
    def strategy(self) -> str:
        """Ray's word for how the ranks are placed. It knows packing and spreading, not a number of ranks a node."""
        if self.per_node != 1:
            return "PACK"
        return "STRICT_SPREAD" if self.fewest == self.most else "SPREAD"

    def __str__(self) -> str:
        kind = "GPU" if self.device == "cuda" else "CPU"
        if self.per_node is not None:
            nodes = f"{self.num_nodes} node{'s' * (self.num_nodes > 1)}"
            return f"{nodes} with {self.per_node} {kind}{'s' * (self.per_node > 1)} each"
        return f"{self.fewest} {kind}{'s' * (self.fewest > 1)}"


def shortage(placement: PlacementRequest, cluster: RayCluster) -> list[Problem]:
    """What the ranks need and the cluster can never have, as it is now.

    >>> two = RayCluster((RayNode("n1", 4, 0), RayNode("n2", 4, 0)))
    >>> [problem.what for problem in shortage(PlacementRequest("cpu", 9, 9), two)]
    ['9 CPUs are needed, and the Ray cluster has 8']
    """
    key = "GPU" if placement.device == "cuda" else "CPU"
    there = ", ".join(map(str, cluster.nodes)) or "no node"
    if cluster.grows_to is not None and cluster.grows_to.get(key, 0) >= placement.fewest:
        return []
    wide = [node for node in cluster.nodes if node.slots(placement.device) >= (placement.per_node or 1)]
    slots = cluster.slots(placement.device)
    if placement.per_node is not None and len(wide) < -(-placement.fewest // placement.per_node):
        what = f"{placement} are needed, and the Ray cluster has {len(wide)} such node{'s' * (len(wide) != 1)}"
    elif slots < placement.fewest:
        what = f"{placement} are needed, and the Ray cluster has {slots}"
    else:
        return []
    fewer = f"set num_gpus={slots}, or " if slots else ""
    without = "" if key == "CPU" or not cluster.nodes else "set device=cpu, or "
    return [Problem(what, why=f"the cluster has: {there}", do=f"{fewer}{without}add nodes with: ray start --address …")]


@contextmanager
def connected(address: str | None, cpus: int, device: str) -> Iterator[RayCluster]:
    """A connection for as long as this lasts; one that this process has already is used, and left as it is.

    Without an address, a cluster on this machine is started and ended, with room for `cpus` ranks.
    """
    if ray.is_initialized():
        yield _count(is_private=False)
        return
    with environ_with(_unset(_QUIET | (_PRIVATE if address is None else {}))):
        try:
            if address is None:
                _start(cpus, device)
            else:
                _join(address)
            yield _count(is_private=address is None)
        finally:
            ray.shutdown()


def cluster_now(address: str) -> RayCluster:
    """What a cluster has; this process stays connected to it."""
    if not ray.is_initialized():
        with environ_with(_unset(_QUIET)):
            _join(address)
    return _count(is_private=False)


def _unset(variables: dict[str, str]) -> dict[str, str]:
    environ = inherited_environ()
    return {name: value for name, value in variables.items() if name not in environ}


def _start(cpus: int, device: str) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    more: dict[str, Any] = {} if device == "cuda" else {"num_gpus": 0}
    _init(address="local", num_cpus=max(cpus, cores), include_dashboard=False, **more)


def _init(**how: Any) -> None:
    ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **how)


def _join(address: str) -> None:
    """Within seconds, or an error that says what was tried."""
    tried, resolved = _resolve(address)
    problem = _no_server(resolved) if resolved else "no cluster was found"
    if problem:
        raise _no_answer(address, [*tried, problem])
    failed: list[BaseException] = []

    def init() -> None:
        try:
            _init(address=resolved)
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: raised in the one that waits
            failed.append(error)

    thread = threading.Thread(target=init, daemon=True, name="ray.init")  # it has no timeout of its own
    thread.start()
    thread.join(_JOIN_S)
    if thread.is_alive():
        raise _not_let_in(address, [*tried, f"no answer of {resolved} within {_JOIN_S:g} s"])
    if failed:
        text = str(failed[0]).strip().splitlines()
        raise _not_let_in(address, [*tried, f"asked {resolved}: {text[0] if text else type(failed[0]).__name__}"])


def _resolve(address: str) -> tuple[list[str], str]:
    """The address of the cluster that "auto" means, and where it was looked for."""
    if address != "auto":
        return [], address
    environ = inherited_environ()
    named = environ.get("RAY_ADDRESS", "")
    if named and named != "auto":
        return [f"RAY_ADDRESS={named}"], named
    folder = environ.get("RAY_TMPDIR", "") or tempfile.gettempdir()
    path = Path(folder, "ray", "ray_current_cluster")
    tried = ["looked at RAY_ADDRESS, which is not set"]
    try:
        found = path.read_text().strip()
    except OSError:
        return [*tried, f"looked at {path}, which is not there"], ""
    return [*tried, f"{path} names {found}"], found


def _no_server(address: str) -> str:
    """Why no server of Ray's kind is there, if so: Ray itself would wait for a minute and more before it says so.

    Ray speaks gRPC, which is HTTP/2, in which a server says hello with its settings.
    """
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if not host or not port.isdigit():
        return f"{address!r} is not host:port"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as line:
            if inherited_environ().get("RAY_USE_TLS", "0") != "0":
                return ""
            line.sendall(_HELLO)
            answer = line.recv(9)
    except OSError as error:
        return f"connected to {host}:{port} and asked for up to {_ANSWER_S:g} s: {error}"
    is_server = len(answer) > 3 and answer[3] == _SETTINGS
    return "" if is_server else f"asked {host}:{port}: something answers there that is no Ray"


def _no_answer(address: str, tried: Sequence[str]) -> LaunchError:
    hint = (
        f"{_START} --ray-client-server-port=10001"
        if address.startswith(_CLIENT)
        else f"check the address (`ray status --address …`), or {_START}; from a machine that is no node of the "
        "cluster, use ray://host:10001"
    )
    return LaunchError(f"no Ray cluster answers at address={address!r}", why="; ".join(tried), do=hint)


def _not_let_in(address: str, tried: Sequence[str]) -> LaunchError:
    """Something listens there. Ray reports a wrong token, or none, in different words, or not at all."""
    mode = inherited_environ().get("RAY_AUTH_MODE", "")
    return LaunchError(
        f"the Ray cluster at address={address!r} answers, and did not let this process in",
        why="; ".join([*tried, f"RAY_AUTH_MODE is {mode or 'not set'} here"]),
        do="set RAY_AUTH_MODE=token and the cluster's token (RAY_AUTH_TOKEN, or ~/.ray/auth_token), and use the "
        "cluster's versions of Ray and Python",
    )


def _count(*, is_private: bool) -> RayCluster:
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    found = [
        RayNode(node["NodeManagerHostname"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in nodes
    ]
    return RayCluster(tuple(sorted(found, key=lambda node: node.host)), _most(), is_private)


def _most() -> dict[str, float] | None:
    """What an autoscaler could bring the cluster to, where it has one and says so."""
    from ray._private.state import state

    try:
        most = state.get_max_resources_from_cluster_config()
    except Exception:  # noqa: BLE001 - Ray's own state: over ray:// only the cluster's processes can ask
        return None
    return None if most is None else {name: float(amount) for name, amount in most.items()}


def largest_node(address: str) -> tuple[int, int]:
    """The GPUs and CPUs of the largest machine of a cluster; a run on several of them counts on that many of each."""
    with connected(address, 0, "cpu") as cluster:
        if not cluster.nodes:
            return 0, 1
        largest = max(cluster.nodes, key=lambda node: (node.gpus, node.cpus))
        return int(largest.gpus), int(largest.cpus)
