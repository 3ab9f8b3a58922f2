"""Ray's part of a plan: what its cluster is asked for, and the settings that Ray decides instead."""

from __future__ import annotations

import re
import sys
from typing import Any

from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import Decision, Plan

_HOST_PORT = re.compile(r"(ray://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})")
_RAYS = {  # settings of our own launcher, and why they have no effect here
    "master_addr": "Ray's nodes are found by the address of their cluster, and the rendezvous is on rank 0's node",
    "master_port": "the rendezvous is at a free port of rank 0's node",
    "node_rank": "Ray numbers the nodes",
    "share_gpus": "Ray gives every rank a GPU of its own",
    "hang_timeout_s": "Ray watches the ranks; one that hangs is found by collective_timeout_s",
}


def problems_of(config: DistributedConfig) -> list[Problem]:
    """What can be said of the settings before a model is there."""
    found = []
    address = config.address
    if address is not None and address != "auto" and not _is_address(address):
        found.append(
            Problem(
                f"address={address!r} ({config.source('address')}) is not the address of a Ray cluster",
                why="an address is auto, host:port (of `ray start --head`, port 6379 by default), or ray://host:port",
                do="set address=auto on a node of the cluster, ray://HOST:10001 elsewhere; or leave it out",
            )
        )
    nodes = "max_nodes" if config.max_nodes else "num_nodes"
    if (config.max_nodes or config.num_nodes) > 1 and address is None and not _is_connected():
        found.append(
            Problem(
                f"{nodes}={config.max_nodes or config.num_nodes} ({config.source(nodes)}), but no address",
                why="without one, Ray is started on this machine for this run, and has one node",
                do="set address (--address) to that of a cluster with as many; or num_gpus, for ranks on this machine",
            )
        )
    for name, why in _RAYS.items():
        if config.given(name):
            what = f"{name} ({config.source(name)}) would have no effect with backend='ray'"
            found.append(Problem(what, why=why, do=f"leave {name} out"))
    return found


def _is_connected() -> bool:
    """Whether this process is in a cluster already, which is then the run's."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _is_address(address: str) -> bool:
    match = _HOST_PORT.fullmatch(address)
    return match is not None and 0 < int(match.group(3)) < 65536


def plan_engine(
    config: DistributedConfig, profile: Any, plan: Plan, decisions: list[Decision], problems: list[Problem]
) -> dict[str, Any]:
    """How many ranks Ray may give the run, and what a fault costs it."""
    per_node = plan.ranks_per_node
    fewest = (config.min_nodes or plan.num_nodes) * min(config.min_gpus or per_node, per_node)
    most = (config.max_nodes or plan.num_nodes) * per_node
    legal = plan.legal_sizes
    illegal = [size for size in range(fewest, most + 1) if legal and size not in legal]
    if illegal and fewest < most:
        names = ", ".join(name for name in ("min_gpus", "min_nodes", "max_nodes") if config.given(name))
        between = [size for size in legal if fewest <= size <= most]
        problems.append(
            Problem(
                f"Ray may give the run {fewest} to {most} ranks, and it cannot train with {_some(illegal)}",
                why=f"of these, only {_some(between)} split the model and the global batch evenly",
                do=f"leave out {names}, which let the number of ranks change",
            )
        )
    if plan.checkpoint.every is None:
        reason = "Ray restarts all ranks after a fault, and they resume from the newest checkpoint"
        decisions.append(
            Decision("after a fault, step 0", f"{reason}; none is saved before the end", "checkpoint_frequency")
        )
    where = config.address or "a cluster on this machine for this run"
    size = f"{most}" if fewest == most else f"{fewest} to {most}"
    decisions.append(Decision(f"Ray places {size} rank{'s' * (most > 1)}", f"on {where}", "address"))
    return {"address": config.address or "", "fewest": fewest, "most": most}


def _some(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:6])) + (", …" if len(sizes) > 6 else "")
