"""The number of ranks and their device: the part of a plan that is decided before the ranks start.

Ranks do not decide again: they read their world size from the environment, and use the GPUs that are visible to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distributed.core.choices import Device
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import engine_of
from distributed.core.engines.launchers import launcher_of
from distributed.core.env import WorkerEnv
from distributed.core.errors import Problem
from distributed.core.plan import Decision
from distributed.core.registry import load_target
from distributed.planner.hardware import Hardware


@dataclass(frozen=True)
class Resources:
    """The nodes and devices of the ranks."""

    device: Device
    num_nodes: int
    world_size: int
    shares_gpus: bool = False  # whether several ranks of a node use the same GPU

    @property
    def ranks_per_node(self) -> int:
        return -(-self.world_size // self.num_nodes)


def plan_resources(config: DistributedConfig, hardware: Hardware) -> tuple[Resources, list[Decision], list[Problem]]:
    """The ranks to start and their device, decided without model or data, so that a launcher can ask."""
    decisions: list[Decision] = []
    problems: list[Problem] = []
    gpus = len(hardware.gpus)
    device = _device(config, hardware)
    per_node = _asked_per_node(config)
    if per_node is None:
        per_node = gpus if device == "cuda" and gpus else 1
        if per_node > 1 or device == "cpu":
            why = (
                f"all {gpus} GPUs of this machine"
                if device == "cuda"
                else "no number was given, and there is no CUDA device"
            )
            decisions.append(Decision(f"{per_node} rank{'s' * (per_node > 1)} a node", why, "num_gpus"))
    elif device == "cpu" and config.device == "auto":
        decisions.append(_on_cpu(config, per_node))
    engine = engine_of(config)
    problems += load_target(engine.checks)(config) if engine.checks else []
    asked_by = f"num_gpus ({config.source('num_gpus')}), gpus_per_node ({config.source('gpus_per_node')})"
    spans = engine.spans or config.address is not None
    if not spans:
        problems += _too_few_gpus(config, device, per_node, hardware, asked_by)
    most_nodes = config.max_nodes or config.num_nodes
    if most_nodes > 1 and config.master_addr is None and not spans:
        problems.append(
            Problem(
                f"{'max_nodes' if config.max_nodes else 'num_nodes'}={most_nodes}, but no master_addr",
                why="the nodes need one address for their rendezvous",
                do="set master_addr (--master-addr) to the host name of one node, the same on all nodes",
            )
        )
    if device == "cpu" and per_node > hardware.cpu_cores and config.address is None:
        decisions.append(
            Decision("more processes than cores", f"{per_node} processes share {hardware.cpu_cores} cores", "num_gpus")
        )
    resources = _share(config, Resources(device, config.num_nodes, config.num_nodes * per_node), hardware, decisions)
    return resources, decisions, problems


def read_resources(
    config: DistributedConfig, hardware: Hardware, world: WorkerEnv
) -> tuple[Resources, list[Decision], list[Problem]]:
    """The resources of a world that another launcher has started, whose size overrides the config's."""
    decisions: list[Decision] = []
    device, is_as_asked = _device(config, hardware), config.num_gpus in (None, world.world_size)
    found = Resources(device, world.num_nodes, world.world_size)
    per_node = _asked_per_node(config) if is_as_asked else found.ranks_per_node
    if per_node is not None and device == "cpu" and config.device == "auto":
        decisions.append(_on_cpu(config, per_node))
    if not is_as_asked:
        why = f"{world.launcher} started them; num_gpus={config.num_gpus} is not used"
        decisions.append(Decision(f"{world.world_size} ranks", why))
    problems = _too_few_gpus(config, device, world.local_world_size, hardware, world.launcher)
    return _share(config, found, hardware, decisions), decisions, problems


def _device(config: DistributedConfig, hardware: Hardware) -> Device:
    if config.device != "auto":
        return config.device
    return "cuda" if hardware.gpus else "cpu"


def _asked_per_node(config: DistributedConfig) -> int | None:
    return config.gpus_per_node or (config.num_gpus // config.num_nodes if config.num_gpus else None)


def _on_cpu(config: DistributedConfig, per_node: int) -> Decision:
    return Decision(
        f"{per_node} CPU process{'es a node' if per_node > 1 else ''}",
        f"{'the cluster' if config.address else 'this machine'} has no CUDA device, so 'GPU' means process",
        "device",
    )


def _share(config: DistributedConfig, resources: Resources, hardware: Hardware, decisions: list[Decision]) -> Resources:
    """The effect of `share_gpus`, as a decision, if it was set."""
    ranks, gpus = resources.ranks_per_node, len(hardware.gpus)
    if not config.share_gpus:
        return resources
    if resources.device != "cuda":
        decisions.append(Decision("share_gpus has no effect", "the ranks are CPU processes", "device"))
        return resources
    if ranks <= gpus:
        why = f"{ranks} rank{'s' * (ranks > 1)} on a node with {gpus} GPU{'s' * (gpus > 1)}: each has its own"
        decisions.append(Decision("share_gpus has no effect", why))
        return resources
    what = f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}"
    decisions.append(Decision(what, "to try the run, not for speed", "share_gpus"))
    return replace(resources, shares_gpus=True)


def _too_few_gpus(
    config: DistributedConfig, device: str, ranks: int, hardware: Hardware, asked_by: str
) -> list[Problem]:
    gpus = len(hardware.gpus)
    can_share = engine_of(config).models == "torch"  # the others refuse the setting
    is_one_of_many = gpus == 1 and launcher_of(asked_by).shows_one_gpu
    if device != "cuda" or ranks <= gpus or is_one_of_many or (gpus and config.share_gpus):
        return []
    share = f", share_gpus=true (--share-gpus) to try {ranks} ranks on fewer GPUs" if can_share else ""
    return [
        Problem(
            f"{ranks} GPU{'s' * (ranks > 1)} asked for on this node, but it has {gpus}",
            why=f"{asked_by} asked for {ranks}",
            do=f"set num_gpus={gpus}{share}, or device=cpu for processes" if gpus else "set device=cpu",
        )
    ]
