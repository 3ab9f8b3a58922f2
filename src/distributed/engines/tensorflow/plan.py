"""TensorFlow's part of a plan: which strategy keeps the replicas alike, and how many processes that takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from distributed.core.choices import ReplicaStrategy
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.errors import PlanError, Problem
from distributed.core.plan import Decision, Plan
from distributed.core.values import parse_frequency

# Settings that only torch's engines read; given for TensorFlow, they would have no effect.
_OF_TORCH = (
    "bucket_cap_mb",
    "sample_ledger",
    "sample_check",
    "certificate_steps",
    "iterable_split",
    "num_workers",
    "whole_model_on",
    "tf32",
    "keep_freed_memory",
    "share_gpus",
    "val_check_interval",
    "sanity_val_steps",
    "slow_rank",
    "slow_rank_wait_s",
    "min_gpus",
    "min_nodes",
    "max_nodes",
    "max_time",
    "model_summary",
)


@dataclass(frozen=True)
class ProcessLayout:
    """Which processes there are, and how many replicas each of them trains."""

    strategy: ReplicaStrategy
    processes: int  # that train, over all nodes
    replicas: int  # in each of them
    servers: int = 0  # processes that hold the parameters
    chief: int = 0  # 1: a process that trains nothing and coordinates the others

    @property
    def tasks(self) -> int:
        """All processes."""
        return self.processes + self.servers + self.chief


def lay_out(config: DistributedConfig, num_nodes: int, devices: int) -> ProcessLayout:
    """The processes for that many devices on each of the nodes.

    >>> lay_out(DistributedConfig(backend="tensorflow"), num_nodes=1, devices=4)
    ProcessLayout(strategy='mirrored', processes=1, replicas=4, servers=0, chief=0)
    >>> lay_out(DistributedConfig(backend="tensorflow"), num_nodes=2, devices=4)
    ProcessLayout(strategy='multi_worker', processes=8, replicas=1, servers=0, chief=0)
    """
    kind = config.tensorflow_strategy
    if kind == "auto":
        kind = "mirrored" if num_nodes == 1 and config.address is None else "multi_worker"
    if kind == "parameter_server":
        return ProcessLayout(kind, num_nodes * devices, 1, config.parameter_servers, chief=1)
    if kind == "multi_worker":  # TensorFlow has one replica a process where it trains on CPUs: so everywhere
        return ProcessLayout(kind, num_nodes * devices, 1)
    return ProcessLayout(kind, 1, num_nodes * devices)


def processes(config: DistributedConfig, num_nodes: int, devices: int) -> int:
    """How many processes one node starts for its devices."""
    return -(-lay_out(config, num_nodes, devices).tasks // num_nodes)


def plan_engine(
    config: DistributedConfig, profile: Any, plan: Plan, decisions: list[Decision], problems: list[Problem]
) -> dict[str, Any]:
    """TensorFlow's part of the plan. A data rank of the plan is a replica, of which a process may have several."""
    layout = lay_out(config, plan.num_nodes, plan.ranks_per_node)
    if config.tensorflow_strategy == "auto" and plan.world_size > 1:
        decisions.append(_why(layout, plan))
    problems += _problems(config, layout, plan)
    return asdict(layout) | {"tasks": layout.tasks, "communication": config.communication_backend}


def cut_for(plan: Plan, processes: int, num_nodes: int) -> Plan:
    """The plan for the processes that are there, which may be fewer or more than were asked for: the batch stays."""
    engine = plan.engine
    if engine["strategy"] != "multi_worker" or processes == engine["processes"]:
        return plan
    cut = plan.for_world(processes * engine["replicas"], num_nodes)
    return replace(cut, engine=engine | {"processes": processes, "tasks": processes})


def check_world(plan: Plan, world: WorkerEnv) -> None:
    """Refuse a launcher's world that this plan is not for: its processes would each train by themselves, or for ever
    wait for processes that were not started."""
    strategy, tasks = plan.engine["strategy"], plan.engine["tasks"]
    if strategy == "parameter_server" and not world.is_followed:
        raise PlanError(
            f"tensorflow_strategy='parameter_server' under {world.launcher}",
            why="workers and servers answer until a launcher ends them, and this one waits for them to end",
            do=f"distributed train --script … --backend tensorflow --num-gpus {plan.world_size} "
            "tensorflow_strategy=parameter_server",
        )
    if strategy != "multi_worker" and world.world_size != tasks:
        raise PlanError(
            f"{world.launcher} started {world.world_size} processes, and tensorflow_strategy={strategy!r} has {tasks} "
            f"for {plan.world_size} replicas",
            why="each of the processes would train a whole run" if tasks == 1 else "",
            do="set tensorflow_strategy where the processes are started: --backend tensorflow "
            f"tensorflow_strategy={strategy}"
            if world.is_followed
            else f"start {tasks}, or set tensorflow_strategy='multi_worker'",
        )


def _why(layout: ProcessLayout, plan: Plan) -> Decision:
    if layout.strategy == "mirrored":
        what, why = "MirroredStrategy", f"one process keeps the {layout.replicas} replicas of one machine alike"
    else:
        what, why = "MultiWorkerMirroredStrategy", f"{plan.num_nodes} machines, with a process for each device"
    return Decision(what, why, "tensorflow_strategy")


def _problems(config: DistributedConfig, layout: ProcessLayout, plan: Plan) -> list[Problem]:
    found: list[Problem] = []
    if layout.strategy == "mirrored" and plan.num_nodes > 1:
        found.append(
            Problem(
                f"tensorflow_strategy='mirrored' with num_nodes={plan.num_nodes}",
                why="MirroredStrategy keeps the devices of one process alike",
                do="set tensorflow_strategy='multi_worker'",
            )
        )
    if layout.strategy != "parameter_server" and config.given("parameter_servers"):
        found.append(
            Problem(
                f"parameter_servers={config.parameter_servers}, but tensorflow_strategy={layout.strategy!r}",
                why="only the strategy parameter_server has parameter servers",
                do="set tensorflow_strategy='parameter_server', or leave it out",
            )
        )
    if config.communication_backend in ("gloo", "mpi"):
        found.append(
            Problem(
                f"communication_backend={config.communication_backend!r} with backend='tensorflow'",
                why="TensorFlow has collectives of its own, over gRPC or NCCL",
                do="leave it out",
            )
        )
    if config.checkpoint_frequency and parse_frequency(config.checkpoint_frequency)[1] == "validations":
        why = "TensorFlow runs are validated after each epoch"
        found.append(Problem("checkpoint_frequency by validations", why=why, do="set it to a number of epochs"))
    if config.network_profile != "none" and plan.device == "cpu":
        found.append(
            Problem(
                f"network_profile={config.network_profile!r} would have no effect on CPUs with backend='tensorflow'",
                why="its CPU ranks send by gRPC, and the addresses in TF_CONFIG decide on the interface",
                do="leave network_profile out",
            )
        )
    found += _server_problems(config, layout, plan)
    for name in _OF_TORCH:
        if config.given(name):
            why = "backend='tensorflow' does not read it"
            found.append(Problem(f"{name} is set, but would have no effect", why=why, do=f"leave {name} out"))
    return found


def _server_problems(config: DistributedConfig, layout: ProcessLayout, plan: Plan) -> list[Problem]:
    """What does not go together with workers that each update what the servers hold, when they have a gradient."""
    if layout.strategy != "parameter_server":
        return []
    asked = {
        f"num_nodes={plan.num_nodes}": (plan.num_nodes > 1, "its processes are started on one machine"),
        f"gradient_accumulation_steps={config.gradient_accumulation_steps}": (
            config.gradient_accumulation_steps != 1,
            "each worker updates the parameters with every batch that it is handed",
        ),
        "mixed_precision='fp16'": (plan.precision.kind == "fp16", "workers would change one scale of the loss at once"),
    }
    return [
        Problem(f"{what} with tensorflow_strategy='parameter_server'", why=why, do="leave one of them out")
        for what, (is_asked, why) in asked.items()
        if is_asked
    ]
