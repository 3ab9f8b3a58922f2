"""How many ranks, and on which device: decided before there is a model."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.core.config import DistributedConfig
from distributed.core.engines import engine_of
from distributed.core.errors import Problem
from distributed.core.plan import Decision
from distributed.core.registry import load_target
from distributed.planner.hardware import Hardware


@dataclass(frozen=True)
class Resources:
    """Where the ranks run."""

    device: str
    num_nodes: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


def plan_resources(config: DistributedConfig, hardware: Hardware) -> tuple[Resources, list[Decision], list[Problem]]:
    """How many ranks on which device; needs neither model nor data, so a launcher can ask before it starts a script."""
    decisions: list[Decision] = []
    problems: list[Problem] = []
    gpus = len(hardware.gpus)
    device = config.device if config.device != "auto" else ("cuda" if gpus else "cpu")
    per_node = config.gpus_per_node or (config.num_gpus // config.num_nodes if config.num_gpus else None)
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
        decisions.append(
            Decision(
                f"{per_node} CPU process{'es a node' if per_node > 1 else ''}",
                f"{'the cluster' if config.address else 'this machine'} has no CUDA device, so 'GPU' means process",
                "device",
            )
        )
    engine = engine_of(config)
    problems += load_target(engine.checks)(config) if engine.checks else []
    asked_by = f"num_gpus ({config.source('num_gpus')}), gpus_per_node ({config.source('gpus_per_node')})"
    if config.share_gpus:
        decisions.append(_sharing(device, per_node, gpus))
    elif not engine.spans:
        problems += too_few_gpus(device, per_node, hardware, asked_by)
    most_nodes = config.max_nodes or config.num_nodes
    if most_nodes > 1 and config.master_addr is None and not engine.spans:
        problems.append(
            Problem(
                f"{'max_nodes' if config.max_nodes else 'num_nodes'}={most_nodes}, but no master_addr",
                why="the nodes cannot find each other",
                do="set master_addr (--master-addr) to the host name of one of them, the same on all",
            )
        )
    if device == "cpu" and per_node > hardware.cpu_cores and config.address is None:
        decisions.append(
            Decision(
                "more processes than cores", f"{per_node} on {hardware.cpu_cores} cores; they will share", "num_gpus"
            )
        )
    return Resources(device, config.num_nodes, per_node), decisions, problems


def _sharing(device: str, ranks: int, gpus: int) -> Decision:
    if device != "cuda":
        return Decision("share_gpus has no effect", "the ranks are CPU processes", "device")
    if ranks <= gpus:
        return Decision("share_gpus has no effect", f"{ranks} ranks on a node with {gpus} GPUs: each has its own")
    return Decision(f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}", "to try the run, not for speed", "share_gpus")


_SHOW_ONE_GPU = ("srun", "distributed", "ray")  # launchers that may show each rank its own GPU only


def too_few_gpus(device: str, ranks: int, hardware: Hardware, asked_by: str) -> list[Problem]:
    gpus = len(hardware.gpus)
    if device != "cuda" or ranks <= gpus or (gpus == 1 and asked_by in _SHOW_ONE_GPU):
        return []
    return [
        Problem(
            f"{ranks} GPU{'s' * (ranks > 1)} asked for on this node, but it has {gpus}",
            why=f"asked by {asked_by}",
            do=f"set num_gpus={gpus}, share_gpus=true to try {ranks} ranks on fewer GPUs, or device=cpu for processes"
            if gpus
            else "set device=cpu",
        )
    ]
