"""LaunchRequest, the run to launch; NodeProcesses, the ranks of one node; Rendered, a run as text. Nothing runs yet."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from distributed.core.choices import Device
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.registry import load_target
from distributed.core.secrets import mask, mask_arguments

DEFAULT_RENDEZVOUS_PORT = 29400  # of the rendezvous when no master_port is given; torch elastic's own default


@dataclass(frozen=True)
class Role:
    """A rank's role, if its engine's ranks are not all workers."""

    env: Mapping[str, str] = field(default_factory=dict)  # variables of its role, beside RANK and the like
    serves: bool = False  # a server: it is ended after the workers have ended, and gets no stop signal
    is_vital: bool = False  # if it ends, no other rank can continue with its state


class NodeVariables(Protocol):
    def __call__(self, environ: Mapping[str, str], *, towards: str = "", nodes: int = 0) -> Mapping[str, str]:
        """What a node finds for its own ranks, which have that environment. From a cluster that has placed them: the
        host of rank 0, and the number of nodes."""


class Roles(Protocol):
    def __call__(self, place: NodePlace, device: str) -> Sequence[Role]:
        """The roles of this node's ranks in a world, in the order of the ranks."""

    def placed(self, addresses: Sequence[str], rank: int) -> Mapping[str, str]:
        """The variables of a rank that a cluster has placed, by the addresses of all ranks (host:port)."""


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt of one run: a command for every rank of this node.

    `command` is what would follow `python`: a script and its arguments, or `-m module …`.
    """

    command: tuple[str, ...]
    run_dir: str
    ranks_per_node: int
    num_nodes: int = 1  # the nominal size
    min_nodes: int | None = None  # None: num_nodes
    max_nodes: int | None = None
    node_rank: int | None = None  # None: agreed at the rendezvous
    master_addr: str | None = None
    master_port: int | None = None
    threads_per_rank: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # for every rank, beside what this process has
    attempt: int = 0
    device: Device = "cpu"
    shares_gpus: bool = False  # whether several ranks use the same GPU
    gpus: int = 0  # of this node, where several ranks share them
    warm: bool = False  # fork the ranks from one process that has done the imports
    preload: tuple[str, ...] = ()  # the modules that this process imports; none: torch and this library
    roles: Roles | None = None  # of the ranks, if they are not all workers
    network: NodeVariables | None = None  # by which the ranks of a node reach the others
    join_token: str = field(default="", repr=False)  # the secret of a run over several nodes; "": node 0 makes one
    address: str | None = None  # of the cluster whose own scheduler places the ranks
    local_rank_option: str = ""  # "--local-rank": each rank's script gets it with its local rank, as first argument
    has_input: bool = False  # rank 0 reads the standard input of this process; the others have none

    def for_engine(self, name: str, config: DistributedConfig) -> LaunchRequest:
        """The request as this engine starts it: the number of processes, their environment and preloads."""
        engine, devices = ENGINES.entries[name], self.ranks_per_node
        ranks = load_target(engine.processes)(config, self.num_nodes, devices) if engine.processes else devices
        roles = load_target(engine.roles)(config, self.num_nodes, devices) if engine.roles else None
        return replace(self, ranks_per_node=ranks, preload=engine.preloads, roles=roles)

    def command_of(self, local_rank: str | int) -> tuple[str, ...]:
        """The command of one rank.

        >>> LaunchRequest(("train.py", "--lr", "1"), "runs/x", 2, local_rank_option="--local_rank").command_of(1)
        ('train.py', '--local_rank=1', '--lr', '1')
        """
        if not self.local_rank_option:
            return self.command
        at = 2 if self.command[0] == "-m" else 1
        return (*self.command[:at], f"{self.local_rank_option}={local_rank}", *self.command[at:])

    @property
    def fewest_nodes(self) -> int:
        return self.num_nodes if self.min_nodes is None else self.min_nodes

    @property
    def most_nodes(self) -> int:
        return self.num_nodes if self.max_nodes is None else self.max_nodes

    @property
    def rendezvous_endpoint(self) -> tuple[str, int]:
        return self.master_addr or "127.0.0.1", self.master_port or DEFAULT_RENDEZVOUS_PORT


@dataclass(frozen=True)
class NodePlace:
    """This node's ranks in the world, and the rendezvous of all ranks."""

    node_rank: int
    num_nodes: int  # that run ranks; standby nodes come after them
    rank_offset: int
    world_size: int
    master_addr: str
    master_port: int
    ranks: int  # that this node runs; 0: it is on standby
    nodes: tuple[tuple[str, int], ...] = ()  # of each node that runs ranks: its address, and how many

    @staticmethod
    def alone(request: LaunchRequest, port: int) -> NodePlace:
        """The place of the only node; `port` is used when the request names none."""
        assert request.num_nodes == 1, "several nodes get their places at the rendezvous"
        address = request.master_addr or "127.0.0.1"
        ranks = request.ranks_per_node
        return NodePlace(
            node_rank=0,
            num_nodes=1,
            rank_offset=0,
            world_size=ranks,
            master_addr=address,
            master_port=request.master_port or port,
            ranks=ranks,
            nodes=((address, ranks),),
        )


@dataclass(frozen=True)
class ProcessSpec:
    """One rank's process; `env` is added to the environment of the process that starts it."""

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: str
    role: Role = Role()
    has_input: bool = False  # it reads the standard input of the process that starts it


@dataclass(frozen=True)
class NodeProcesses:
    """The processes of one node, ready to be started."""

    run_dir: str
    attempt_dir: str
    processes: tuple[ProcessSpec, ...]
    node_rank: int = 0

    def command_lines(self) -> tuple[str, ...]:
        """Each process as a line that a shell would run.

        >>> process = ProcessSpec(1, ("python", "a b.py"), {"RANK": "1"}, "runs/x/rank-1.log")
        >>> NodeProcesses("runs/x", "runs/x/attempts/0", (process,)).command_lines()
        ("[r1] RANK=1 python 'a b.py' > runs/x/rank-1.log 2>&1",)
        """
        return tuple(
            f"[r{process.rank}] {command_line(process.argv, process.env)} > {shlex.quote(process.log_path)} 2>&1"
            for process in self.processes
        )


@dataclass(frozen=True)
class Rendered:
    """What a launcher would start, as text; secrets are masked.

    >>> print(Rendered(notes=("run directory runs/x",), commands=("[each rank] python train.py",)))
    run directory runs/x
    [each rank] python train.py
    """

    notes: tuple[str, ...]  # where the run goes, and what is known only once it starts
    commands: tuple[str, ...]  # exactly what runs, each with the variables that it gets

    def __str__(self) -> str:
        return "\n".join((*self.notes, *self.commands))


def command_line(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """A command with its variables, quoted for a shell.

    >>> command_line(("python", "a b.py"), {"RANK": "1", "API_TOKEN": "x"})
    "RANK=1 API_TOKEN='***' python 'a b.py'"
    """
    variables = [f"{name}={shlex.quote(mask(value, name))}" for name, value in env.items()]
    return " ".join([*variables, shlex.join(mask_arguments(argv))])
