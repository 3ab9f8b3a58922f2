"""What to launch and what that comes to: LaunchRequest is asked, Rendered is the exact commands; nothing runs yet."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_MEETING_PORT = 29400  # where nodes meet when no master_port is given; torch elastic's own default


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt of one run: a command for every rank of this node.

    `command` is what follows `python -m distributed.launch.rank`: a script and its arguments, or `-m module …`.
    """

    command: tuple[str, ...]
    run_dir: str
    ranks_per_node: int
    num_nodes: int = 1
    node_rank: int | None = None  # None: agreed when the nodes meet
    master_addr: str | None = None
    master_port: int | None = None
    threads_per_rank: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # for every rank, beside what this process has
    attempt: int = 0
    device: str = "cpu"

    @property
    def meeting_point(self) -> tuple[str, int]:
        return self.master_addr or "127.0.0.1", self.master_port or DEFAULT_MEETING_PORT


@dataclass(frozen=True)
class NodePlace:
    """Which part of the world this node is, and where all ranks meet."""

    node_rank: int
    num_nodes: int
    rank_offset: int
    world_size: int
    master_addr: str
    master_port: int

    @staticmethod
    def alone(request: LaunchRequest, port: int) -> NodePlace:
        """The place of the only node; `port` is used when the request names none."""
        assert request.num_nodes == 1, "several nodes get their places from elastic.meet"
        address = request.master_addr or "127.0.0.1"
        return NodePlace(0, 1, 0, request.ranks_per_node, address, request.master_port or port)


@dataclass(frozen=True)
class ProcessSpec:
    """One rank's process; `env` is what is added to the environment of the process that starts it."""

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: str


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
    variables = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
    command = [*variables, shlex.join(process.argv), ">", shlex.quote(process.log_path), "2>&1"]
    return f"[r{process.rank}] " + " ".join(command)
