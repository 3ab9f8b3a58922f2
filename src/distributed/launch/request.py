"""What to launch and what that comes to: LaunchRequest is asked, Rendered is the exact commands; nothing runs yet."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from distributed.core.config import DistributedConfig
from distributed.core.engines import ENGINES
from distributed.core.registry import load_target
from distributed.core.secrets import mask, mask_arguments

DEFAULT_MEETING_PORT = 29400  # where nodes meet when no master_port is given; torch elastic's own default


@dataclass(frozen=True)
class Role:
    """What a rank is to the others, where its engine does not take all for alike."""

    env: Mapping[str, str] = field(default_factory=dict)  # what it finds in its environment, beside who it is
    serves: bool = False  # others use it: it is ended when those who do not serve have ended, and not asked to stop
    is_vital: bool = False  # when it ends, no other rank can go on with what it holds


class Roles(Protocol):
    def __call__(self, place: NodePlace, device: str) -> Sequence[Role]:
        """Of this node's ranks in a world, in their order."""


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt of one run: a command for every rank of this node.

    `command` is what follows `python -m distributed.launch.rank`: a script and its arguments, or `-m module …`.
    """

    command: tuple[str, ...]
    run_dir: str
    ranks_per_node: int
    num_nodes: int = 1  # the nominal size
    min_nodes: int | None = None  # None: num_nodes
    max_nodes: int | None = None
    node_rank: int | None = None  # None: agreed when the nodes meet
    master_addr: str | None = None
    master_port: int | None = None
    threads_per_rank: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # for every rank, beside what this process has
    attempt: int = 0
    device: str = "cpu"
    shares_gpus: bool = False  # whether several ranks have the same one
    warm: bool = False  # fork the ranks from one process that has its imports behind it
    preload: tuple[str, ...] = ()  # what that one imports; none: torch and ours
    roles: Roles | None = None  # of the ranks, where they are not alike
    join_token: str = field(default="", repr=False)  # the secret of a run over several nodes; "": left to the nodes
    address: str | None = None  # of the cluster whose nodes run the ranks, where that is another one's to place

    def for_engine(self, name: str, config: DistributedConfig) -> LaunchRequest:
        """The same as this engine starts it: how many processes for these devices, and what they find and import."""
        engine, devices = ENGINES.entries[name], self.ranks_per_node
        ranks = load_target(engine.processes)(config, self.num_nodes, devices) if engine.processes else devices
        roles = load_target(engine.roles)(config, self.num_nodes, devices) if engine.roles else None
        return replace(self, ranks_per_node=ranks, preload=engine.preloads, roles=roles)

    @property
    def fewest_nodes(self) -> int:
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def most_nodes(self) -> int:
        return self.num_nodes if self.max_nodes is None else self.max_nodes

    @property
    def meeting_point(self) -> tuple[str, int]:
        return self.master_addr or "127.0.0.1", self.master_port or DEFAULT_MEETING_PORT


@dataclass(frozen=True)
class NodePlace:
    """Which part of the world this node is, and where all ranks meet."""

    node_rank: int
    num_nodes: int  # that run ranks; a node that stands by comes after them
    rank_offset: int
    world_size: int
    master_addr: str
    master_port: int
    ranks: int  # that this node runs; 0: it stands by
    nodes: tuple[tuple[str, int], ...] = ()  # of each node that runs ranks: its address, and how many

    @staticmethod
    def alone(request: LaunchRequest, port: int) -> NodePlace:
        """The place of the only node; `port` is used when the request names none."""
        assert request.num_nodes == 1, "several nodes get their places when they meet"
        address = request.master_addr or "127.0.0.1"
        ranks = request.ranks_per_node
        return NodePlace(0, 1, 0, ranks, address, request.master_port or port, ranks, ((address, ranks),))


@dataclass(frozen=True)
class ProcessSpec:
    """One rank's process; `env` is what is added to the environment of the process that starts it."""

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: str
    role: Role = Role()


@dataclass(frozen=True)
class Rendered:
    """The processes of one node, ready to be started."""

    run_dir: str
    attempt_dir: str
    processes: tuple[ProcessSpec, ...]
    node_rank: int = 0

    def __str__(self) -> str:
        return "\n".join(_describe(process) for process in self.processes)

    @property
    def events_path(self) -> Path:
        return Path(self.run_dir) / "events.jsonl"


def _describe(process: ProcessSpec) -> str:
    """The process as a line that a shell would run.

    >>> print(_describe(ProcessSpec(1, ("python", "a b.py"), {"RANK": "1"}, "runs/x/rank-1.log")))
    [r1] RANK=1 python 'a b.py' > runs/x/rank-1.log 2>&1
    """
    variables = [f"{name}={shlex.quote(mask(value, name))}" for name, value in process.env.items()]
    command = [*variables, shlex.join(mask_arguments(process.argv)), ">", shlex.quote(process.log_path), "2>&1"]
    return f"[r{process.rank}] " + " ".join(command)
