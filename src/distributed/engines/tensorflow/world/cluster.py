"""TF_CONFIG: the tasks of a TensorFlow cluster and their addresses. Our launchers write it for every rank.

Rank 0 is the chief, with every strategy. Under a parameter server the workers follow it, then the servers. Nothing
here imports TensorFlow: it runs in the process that starts the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv, announce, gpu_names, inherited_environ, visible_devices
from distributed.core.errors import ConfigError
from distributed.core.plan import Plan
from distributed.engines.tensorflow.plan import ProcessLayout, lay_out
from distributed.launch.ports import LOWEST_PORT, PORTS, free_port
from distributed.launch.request import NodePlace, Role

STRATEGY = "DISTRIBUTED_TENSORFLOW"  # JSON: the strategy to set up before a script makes use of TensorFlow
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 2 leaves out what its servers log of every connection
_OF_TASKS = ("multi_worker", "parameter_server")  # the strategies of several processes
_STRIDE = 101  # between the ports of ranks where it is not known whether they are free on the other nodes


def roles(config: DistributedConfig, num_nodes: int, devices: int) -> Cluster:
    """The roles of a run's ranks, for `Engine.roles`."""
    layout = lay_out(config, num_nodes, devices)
    shared = {} if _LOG_LEVEL in inherited_environ() else {_LOG_LEVEL: "2"}
    shared[STRATEGY] = json.dumps(
        {
            "kind": layout.strategy,
            "replicas": layout.replicas,
            "communication": config.communication_backend,
        }
    )
    if layout.strategy == "parameter_server":
        shared["GRPC_FAIL_FAST"] = "use_caller"  # else a call to a worker that is gone waits for it to come back
    return Cluster(layout, shared, visible_devices())


@dataclass
class Cluster:
    """The tasks of a run and where they listen; computed for every world.

    >>> layout = ProcessLayout("multi_worker", processes=2, replicas=1)
    >>> place = NodePlace(0, 1, 0, 2, "127.0.0.1", 29500, 2, (("127.0.0.1", 2),))
    >>> ports = iter([23456, 23457])
    >>> Cluster(layout, free=lambda: next(ports))(place, "cpu")[1].env["TF_CONFIG"]
    '{"cluster": {"worker": ["127.0.0.1:23456", "127.0.0.1:23457"]}, "task": {"type": "worker", "index": 1}}'
    """

    layout: ProcessLayout
    shared: Mapping[str, str] = field(default_factory=dict)  # variables that are the same for all
    visible: str | None = None  # CUDA_VISIBLE_DEVICES, as it is for all of them
    free: Callable[[], int] = free_port
    _kept: tuple[str, ...] = field(default=(), init=False)

    def __call__(self, place: NodePlace, device: str) -> list[Role]:
        """Of this node's ranks."""
        addresses = self._addresses(place)
        found = []
        for local_rank in range(place.ranks):
            variables = {**self.shared, **self._devices(place, local_rank, device)}
            if addresses:
                variables["TF_CONFIG"] = render(self.layout, addresses, place.rank_offset + local_rank)
            kind = task_of(self.layout, place.rank_offset + local_rank)[0] if self.layout.chief else ""
            found.append(Role(variables, serves=kind in ("worker", "ps"), is_vital=kind in ("chief", "ps")))
        return found

    def placed(self, addresses: Sequence[str], rank: int) -> dict[str, str]:
        """Of a rank that a cluster has placed, where the addresses are known only then."""
        return {**self.shared, "TF_CONFIG": render(self.layout, tuple(addresses), rank)}

    def _addresses(self, place: NodePlace) -> tuple[str, ...]:
        """Of every task, by rank. A server that survives while a worker is replaced keeps its address."""
        if self.layout.strategy not in _OF_TASKS:
            return ()
        if self._kept:
            return self._kept
        if place.num_nodes == 1:
            found = tuple(f"127.0.0.1:{port}" for port in self._free_ports(place.world_size))
        else:
            hosts = [address for address, ranks in place.nodes for _ in range(ranks)]
            found = tuple(f"{host}:{derived_port(place.master_port, rank)}" for rank, host in enumerate(hosts))
        if self.layout.strategy == "parameter_server":
            self._kept = found
        return found

    def _free_ports(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            port = self.free()
            if port not in found:
                found.append(port)
        return found

    def _devices(self, place: NodePlace, local_rank: int, device: str) -> dict[str, str]:
        """One GPU for each task that trains, also where there is one task: TensorFlow takes all that it sees."""
        if device != "cuda" or self.layout.strategy not in _OF_TASKS:
            return {}
        slot = local_rank - self.layout.chief
        trains = 0 <= slot < self.layout.processes
        return {"CUDA_VISIBLE_DEVICES": gpu_names(self.visible, slot + 1)[slot] if trains else ""}


def task_of(layout: ProcessLayout, rank: int) -> tuple[str, int]:
    """
    >>> [task_of(ProcessLayout("parameter_server", 2, 1, servers=1, chief=1), rank) for rank in range(4)]
    [('chief', 0), ('worker', 0), ('worker', 1), ('ps', 0)]
    """
    if layout.chief and rank == 0:
        return "chief", 0
    worker = rank - layout.chief
    return ("worker", worker) if worker < layout.processes else ("ps", worker - layout.processes)


def render(layout: ProcessLayout, addresses: tuple[str, ...], rank: int) -> str:
    """The text of TF_CONFIG for one rank."""
    cluster: dict[str, list[str]] = {}
    for number, address in enumerate(addresses):
        cluster.setdefault(task_of(layout, number)[0], []).append(address)
    kind, index = task_of(layout, rank)
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def derived_port(master_port: int, rank: int) -> int:
    """A port that all nodes compute: rank 0 has the rendezvous port, which nothing else uses here.

    >>> derived_port(29500, 0), derived_port(32700, 1)
    (29500, 20033)
    """
    return LOWEST_PORT + (master_port - LOWEST_PORT + _STRIDE * rank) % PORTS


def announce_in_world(plan: Plan, world: WorkerEnv) -> None:
    """Set TF_CONFIG in a process that mpirun, srun or torchrun started on one host, unless it has one."""
    layout = ProcessLayout(**{known.name: plan.engine[known.name] for known in fields(ProcessLayout)})
    needs = layout.strategy in _OF_TASKS and world.world_size > 1
    if not needs or inherited_environ().get("TF_CONFIG"):
        return
    if world.num_nodes > 1:
        raise ConfigError(
            f"{world.launcher} started this process on one of {world.num_nodes} hosts, and TF_CONFIG is not set",
            why=f"{world.launcher} does not give the ranks the addresses of all hosts",
            do="set TF_CONFIG, or run `distributed train --num-nodes … --master-addr …` on every host",
        )
    # Not the rendezvous endpoint's own port, where torchrun may listen itself.
    ports = (derived_port(world.master_port, rank + 1) for rank in range(world.world_size))
    announce({"TF_CONFIG": render(layout, tuple(f"127.0.0.1:{port}" for port in ports), world.rank)})
