"""network_profile: what it sets on each node, where it would have no effect, and interfaces that are not there."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distributed.core.choices import Device, NetworkProfile
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import launching
from distributed.core.env import WorkerEnv, announce, inherited_environ, worker_env
from distributed.core.errors import LaunchError, Problem
from distributed.core.plan import Decision
from distributed.planner.hardware import Hardware, probe_hardware
from distributed.planner.network.choice import NetworkChoice, choose_variables, wrong_names
from distributed.planner.network.probe import probe_network
from distributed.planner.network.profiles import CLOUDS
from distributed.planner.network.proposals import NetworkRun
from distributed.planner.resources import Resources

_NAMED = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class NodeNetwork:
    """A profile on its way to the nodes: each has interfaces of its own, which are read there."""

    profile: NetworkProfile
    run: NetworkRun
    towards: str = ""  # the host whose route tells the interface

    def __call__(self, environ: Mapping[str, str], *, towards: str = "", nodes: int = 0) -> dict[str, str]:
        """The variables of this node's ranks. A cluster that has placed them knows more than their plan."""
        if self.profile == "none":
            return {}
        run = replace(self.run, nodes=nodes or self.run.nodes)
        machine = probe_network(probe_hardware(), towards or self.towards)
        choice = choose_variables(self.profile, machine, run, environ)
        problems = [*choice.problems, *wrong_names(machine, environ, uses_nccl=self.run.device == "cuda")]
        if problems:
            here = socket.gethostname()
            raise LaunchError([Problem(f"on {here}: {each.what}", why=each.why, do=each.do) for each in problems])
        return choice.to_environ()


def network_of(config: DistributedConfig, nodes: int, device: Device, world: WorkerEnv | None = None) -> NodeNetwork:
    """What a run's nodes are to set. `world`: that of this process, if a launcher has made one."""
    is_sharded = config.backend == "fsdp" or bool(config.zero_stage) or config.sharding not in (None, "none")
    run = NetworkRun(
        max(nodes, config.max_nodes or 1), device, orders_kernels=config.tensor_parallel > 1 and not is_sharded
    )
    return NodeNetwork(config.network_profile, run, world.master_addr if world else config.master_addr or "")


def announce_network(config: DistributedConfig, nodes: int, device: Device, world: WorkerEnv) -> None:
    """The same in a rank, for a world whose launcher did not know the profile; before anything is sent."""
    if world.world_size > 1:
        announce(network_of(config, nodes, device, world)(inherited_environ()))


def plan_network(
    config: DistributedConfig,
    resources: Resources,
    *,
    hardware: Hardware,
    environ: Mapping[str, str],
    engine: str,
    world: WorkerEnv | None = None,
) -> NetworkChoice:
    """What is set on this node. On a cluster, whose nodes are others, only what can be said from here."""
    profile = config.network_profile
    found = network_of(config, resources.num_nodes, resources.device, world)
    problems = _without_effect(config, found.run, is_placed=world is not None)
    is_elsewhere = world is None and launching(engine, config).spans and config.address is not None
    if is_elsewhere:
        why = "each node of the cluster takes its own interface, when its ranks start"
        said = [] if profile == "none" else [Decision(f"network_profile={profile} is for the nodes", why)]
        return NetworkChoice({}, tuple(said), tuple(problems))
    if resources.world_size == 1 and profile != "none":
        said = [Decision(f"network_profile={profile} sets nothing", "a single rank sends nothing")]
        return NetworkChoice({}, tuple(said), tuple(problems))
    if problems or (profile == "none" and not any(environ.get(name) for name in _NAMED)):
        return NetworkChoice({}, (), tuple(problems))
    machine = probe_network(hardware, found.towards)
    choice = choose_variables(profile, machine, found.run, environ)
    who = f"rank {world.rank} on {socket.gethostname()}" if world is not None else ""
    wrong = wrong_names(machine, environ, uses_nccl=resources.device == "cuda", who=who)
    return NetworkChoice(choice.variables, choice.decisions, (*choice.problems, *wrong))


def add_network(
    config: DistributedConfig,
    resources: Resources,
    *,
    hardware: Hardware,
    engine: str,
    world: WorkerEnv | None,
    decisions: list[Decision],
    problems: list[Problem],
) -> None:
    """What is set on this node, among the decisions and problems of a plan."""
    found = plan_network(config, resources, hardware=hardware, environ=inherited_environ(), engine=engine, world=world)
    decisions += found.decisions
    problems += found.problems


def network_here(config: DistributedConfig, resources: Resources, hardware: Hardware, engine: str) -> NetworkChoice:
    """Of this node, before ranks are started. Under another launcher, which knows its nodes, each rank plans it."""
    if worker_env() is not None:
        return NetworkChoice({})
    return plan_network(config, resources, hardware=hardware, environ=inherited_environ(), engine=engine)


def _without_effect(config: DistributedConfig, run: NetworkRun, *, is_placed: bool) -> list[Problem]:
    profile, spans = config.network_profile, config.address is not None
    what = f"network_profile={profile!r} ({config.source('network_profile')}) would have no effect"
    if profile in CLOUDS and run.nodes == 1 and (is_placed or not spans):
        return [
            Problem(
                what,
                why="it is for what nodes send each other, and the ranks of 1 node talk over its loopback and buses",
                do="leave network_profile out, or set num_nodes",
            )
        ]
    return []
