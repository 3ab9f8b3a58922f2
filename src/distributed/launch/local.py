"""LocalLauncher: the ranks of this node as processes of this machine. `render` decides and is pure, `submit` starts."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distributed.core.env import LAUNCHER_PID, WorkerEnv, inherited_environ
from distributed.core.errors import LaunchError
from distributed.core.failure import failure_path
from distributed.launch.job import LocalJob, Screen
from distributed.launch.peers import News, Peers
from distributed.launch.ports import free_port
from distributed.launch.processes import RankProcess, end_all
from distributed.launch.request import LaunchRequest, NodePlace, ProcessSpec, Rendered


@dataclass(frozen=True)
class LocalLauncher:
    """Starts ranks here.

    >>> request = LaunchRequest(("train.py", "--lr", "1"), run_dir="runs/x", ranks_per_node=2)
    >>> rendered = LocalLauncher(environ={}, python="python").render(request, NodePlace.alone(request, port=29500))
    >>> rendered.processes[1].argv
    ('python', '-m', 'distributed.launch.rank', 'train.py', '--lr', '1')
    >>> rendered.processes[1].env["RANK"], rendered.processes[1].env["MASTER_PORT"]
    ('1', '29500')
    """

    environ: Mapping[str, str] = field(default_factory=inherited_environ, repr=False)
    python: str = sys.executable
    interrupt_grace_s: float = (
        300.0  # from the first Ctrl-C to SIGKILL: a few steps and a save; a second one is quicker
    )

    def render(self, request: LaunchRequest, place: NodePlace) -> Rendered:
        """The exact commands, environments and log files of this node's ranks."""
        processes = []
        for local_rank in range(request.ranks_per_node):
            worker = WorkerEnv(
                rank=place.rank_offset + local_rank,
                local_rank=local_rank,
                world_size=place.world_size,
                local_world_size=request.ranks_per_node,
                node_rank=place.node_rank,
                num_nodes=place.num_nodes,
                master_addr=place.master_addr,
                master_port=place.master_port,
                run_dir=request.run_dir,
                attempt=request.attempt,
            )
            processes.append(
                ProcessSpec(
                    rank=worker.rank,
                    argv=(self.python, "-m", "distributed.launch.rank", *request.command),
                    env=self._variables(request, worker),
                    log_path=os.path.join(worker.attempt_dir(request.run_dir), f"rank-{worker.rank}.log"),
                )
            )
        attempt_dir = os.path.join(request.run_dir, "attempts", str(request.attempt))
        return Rendered(request.run_dir, attempt_dir, tuple(processes), place.node_rank)

    def _variables(self, request: LaunchRequest, worker: WorkerEnv) -> dict[str, str]:
        variables = worker.to_environ() | {"PYTHONUNBUFFERED": "1"}
        if request.threads_per_rank is not None and "OMP_NUM_THREADS" not in self.environ:
            variables["OMP_NUM_THREADS"] = str(request.threads_per_rank)
        if request.device == "cpu":  # so that a script which takes a GPU where it sees one keeps to the CPU too
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables | dict(request.env)

    def submit(self, rendered: Rendered) -> LocalJob:
        """Start the processes. They end with this one, and with the thread that calls this."""
        inherited = {name: value for name, value in self.environ.items() if not name.startswith("TORCHELASTIC_")}
        started: list[RankProcess] = []
        try:
            os.makedirs(rendered.attempt_dir, exist_ok=True)
            for spec in rendered.processes:
                failure_path(rendered.attempt_dir, spec.rank).unlink(missing_ok=True)
                environ = inherited | dict(spec.env) | {LAUNCHER_PID: str(os.getpid())}
                started.append(RankProcess(spec, environ))
        except OSError as error:
            end_all(started, grace_s=0.0)
            raise LaunchError(
                f"rank {rendered.processes[len(started)].rank} could not be started",
                why=str(error),
                do=f"check that {rendered.run_dir} can be written and that {self.python} runs",
            ) from error
        except BaseException:
            end_all(started, grace_s=0.0)
            raise
        return LocalJob(rendered, started, self.interrupt_grace_s)

    def run(
        self,
        request: LaunchRequest,
        screen: Screen | None = None,
        *,
        place: NodePlace | None = None,
        peers: Peers | None = None,
        on_stop: Callable[[int], None] | None = None,
    ) -> None:
        """Render, submit and wait. Several nodes pass the place and the peers that `elastic.meet` gave them."""
        rendered = self.render(request, place or NodePlace.alone(request, free_port()))
        try:
            job = self.submit(rendered)
        except LaunchError as error:
            if peers is not None:
                what = error.problems[0].what
                peers.tell(News(rendered.node_rank, socket.gethostname(), "failed", what, exit_code=error.exit_code))
                peers.leave(ok=False)
            raise
        with job:
            job.wait(screen, peers=peers, on_stop=on_stop)
