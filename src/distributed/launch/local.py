"""LocalLauncher: the ranks of this node as processes of this machine. `render` decides and is pure, `run` starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distributed.core.env import JOIN_TOKEN, WorkerEnv, gpu_names, inherited_environ
from distributed.launch.crew import Crew
from distributed.launch.echo import Echo, Screen
from distributed.launch.nodes import Alone, Nodes, Round
from distributed.launch.request import LaunchRequest, NodePlace, ProcessSpec, Rendered, Role
from distributed.launch.supervisor import Patience, Supervisor
from distributed.launch.warm_parent import ALWAYS, preloads

# Of a run on one machine: what gloo and NCCL open is for this machine alone, and not for the network it is on.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}
_FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"  # collectives that torch remembers, for when one hangs; about 1 µs each


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

    def render(self, request: LaunchRequest, place: NodePlace, restarts: int = 0) -> Rendered:
        """The exact commands, environments and log files of this node's ranks."""
        processes = []
        roles = request.roles(place, request.device) if request.roles is not None else [Role()] * place.ranks
        for local_rank in range(place.ranks):
            worker = WorkerEnv(
                rank=place.rank_offset + local_rank,
                local_rank=local_rank,
                world_size=place.world_size,
                local_world_size=place.ranks,
                node_rank=place.node_rank,
                num_nodes=place.num_nodes,
                master_addr=place.master_addr,
                master_port=place.master_port,
                run_dir=request.run_dir,
                attempt=request.attempt,
                restarts=restarts,
                nominal_ranks=request.num_nodes * request.ranks_per_node,
            )
            processes.append(
                ProcessSpec(
                    rank=worker.rank,
                    argv=(self.python, "-m", "distributed.launch.rank", *request.command),
                    env=self._variables(request, worker) | dict(roles[local_rank].env),
                    log_path=os.path.join(worker.attempt_dir(request.run_dir), f"rank-{worker.rank}.log"),
                    role=roles[local_rank],
                )
            )
        attempt_dir = os.path.join(request.run_dir, "attempts", str(request.attempt))
        return Rendered(request.run_dir, attempt_dir, tuple(processes), place.node_rank)

    def _variables(self, request: LaunchRequest, worker: WorkerEnv) -> dict[str, str]:
        variables = worker.to_environ() | {"PYTHONUNBUFFERED": "1"}
        if _FLIGHT_RECORDER not in self.environ:
            variables[_FLIGHT_RECORDER] = "256"
        if request.threads_per_rank is not None and "OMP_NUM_THREADS" not in self.environ:
            variables["OMP_NUM_THREADS"] = str(request.threads_per_rank)
        if request.most_nodes == 1:
            variables |= {name: value for name, value in _LOOPBACK.items() if name not in self.environ}
        if request.device == "cpu":  # so that a script which takes a GPU where it sees one keeps to the CPU too
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables | dict(request.env)

    def run(self, request: LaunchRequest, screen: Screen | None = None, **how: Any) -> None:
        """Submit and wait."""
        self.submit(request, screen, **how).wait()

    def submit(
        self,
        request: LaunchRequest,
        screen: Screen | None = None,
        *,
        nodes: Nodes | None = None,
        first: Round | None = None,
        patience: Patience | None = None,
        on_stop: Callable[[int], None] | None = None,
    ) -> Supervisor:
        """Start the ranks; whoever waits for them also starts them again for as long as `patience` goes.

        They end with this process, and with the thread that calls this. Several nodes pass how they meet, and where
        they have met.
        """
        kept_back = ("TORCHELASTIC_", JOIN_TOKEN)
        inherited = {name: value for name, value in self.environ.items() if not name.startswith(kept_back)}
        nodes = nodes or Alone(request)
        echo = Echo(screen)
        script = None if request.command[0] == "-m" else request.command[0]
        preload = preloads(script, request.preload or ALWAYS) if request.warm else None
        supervisor = Supervisor(
            request,
            nodes,
            Crew(
                inherited,
                self.python,
                preload=preload,
                frees_devices=request.device == "cuda",
                on_started=lambda member: echo.follow(member.rank, member.process.log_path),
                door=nodes.door,
            ),
            lambda round_, slots: self.render_round(request, round_, slots),
            echo,
            patience or Patience(),
            on_stop,
        )
        try:
            supervisor.start(first)
        except BaseException:
            supervisor.close()
            raise
        return supervisor

    def render_round(self, request: LaunchRequest, round_: Round, slots: Sequence[int]) -> Rendered:
        """The ranks of this node in a round; a rank has the GPU of its slot, also when others are left out."""
        request = replace(request, run_dir=round_.run_dir, attempt=round_.attempt)
        rendered = self.render(request, round_.place, round_.restarts)
        if request.device != "cuda" or request.shares_gpus or list(slots) == list(range(len(slots))):
            return rendered
        names = gpu_names(self.environ.get("CUDA_VISIBLE_DEVICES"), max(slots) + 1)
        specs = [
            replace(spec, env=dict(spec.env) | {"CUDA_VISIBLE_DEVICES": names[slot]})
            for spec, slot in zip(rendered.processes, slots, strict=False)
        ]
        return replace(rendered, processes=tuple(specs))
