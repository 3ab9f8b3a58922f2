"""LocalLauncher: the ranks of this node as local processes. `node_processes` decides and is pure, `submit` starts."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from distributed.core.env import JOIN_TOKEN, LOCAL_PLACE, WorkerEnv, gpu_names, inherited_environ
from distributed.core.run_dir import RunDir
from distributed.launch.base import Launcher
from distributed.launch.node.command import rank_argv
from distributed.launch.node.log_mirror import LogMirror, MirrorScreen
from distributed.launch.node.preloading import ALWAYS, Preloads, preloads
from distributed.launch.node.rank_group import RankGroup
from distributed.launch.node.warm_parent import WarmParent
from distributed.launch.program_file import program_file
from distributed.launch.rendezvous.nodes import Alone, Nodes, Round
from distributed.launch.request import LaunchRequest, NodePlace, NodeProcesses, ProcessSpec, Rendered, Role
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.launch.supervise.supervisor import Supervisor

# A run on one machine: gloo and NCCL listen on the loopback interface, and not on the network.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}
_SHOWN_PORT = 29500  # where a free one is chosen at the start; torch's own default
_FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"  # collectives that torch records, to explain a hang; about 1 µs each


@dataclass(frozen=True)
class LocalLauncher(Launcher):
    """Starts ranks as processes of this machine.

    >>> request = LaunchRequest(("train.py", "--lr", "1"), run_dir="runs/x", ranks_per_node=2)
    >>> launcher = LocalLauncher(environ={}, python="python")
    >>> process = launcher.node_processes(request, NodePlace.alone(request, port=29500)).processes[1]
    >>> process.argv[3:]
    ('train.py', '--lr', '1')
    >>> process.env["RANK"], process.env["MASTER_PORT"]
    ('1', '29500')
    """

    environ: Mapping[str, str] = field(default_factory=inherited_environ, repr=False)
    python: str = sys.executable

    def node_processes(self, request: LaunchRequest, place: NodePlace, restarts: int = 0) -> NodeProcesses:
        """The exact commands, environments and log files of this node's ranks."""
        processes, attempt = [], RunDir(request.run_dir).attempt(request.attempt)
        roles = request.roles(place, request.device) if request.roles is not None else [Role()] * place.ranks
        network = request.network(self.environ) if request.network is not None else {}
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
            variables = self._variables(request, worker, network)
            processes.append(
                ProcessSpec(
                    rank=worker.rank,
                    argv=rank_argv(self.python, request.command_of(variables["LOCAL_RANK"])),
                    env=variables | dict(roles[local_rank].env),
                    log_path=str(attempt.log(worker.rank)),
                    role=roles[local_rank],
                    has_input=request.has_input and worker.is_main,
                )
            )
        return NodeProcesses(request.run_dir, str(attempt), tuple(processes), place.node_rank)

    def _variables(self, request: LaunchRequest, worker: WorkerEnv, network: Mapping[str, str]) -> dict[str, str]:
        variables = worker.to_environ() | {"PYTHONUNBUFFERED": "1"}
        if _FLIGHT_RECORDER not in self.environ:
            variables[_FLIGHT_RECORDER] = "256"
        if request.threads_per_rank is not None and "OMP_NUM_THREADS" not in self.environ:
            variables["OMP_NUM_THREADS"] = str(request.threads_per_rank)
        if request.most_nodes == 1:
            variables |= {name: value for name, value in _LOOPBACK.items() if name not in self.environ}
        variables |= network
        if request.device == "cpu":  # so that a script that uses any visible GPU runs on the CPU too
            variables["CUDA_VISIBLE_DEVICES"] = ""
        if request.device == "cuda" and request.shares_gpus:
            variables |= on_shared_gpu(worker, request.gpus)
        return variables | dict(request.env)

    def render(self, request: LaunchRequest, limits: RestartLimits) -> Rendered:
        """The commands of this node's ranks, with the values that are known before the rendezvous."""
        port, notes, request = request.master_port or _SHOWN_PORT, [], _with_limits(request, limits)
        if request.num_nodes == 1:
            place = NodePlace.alone(request, port)
            if request.master_port is None:
                notes.append(f"MASTER_PORT is a free port that is chosen at the start; {port} stands for it here")
        else:
            host, rendezvous_port = request.rendezvous_endpoint
            node = request.node_rank or 0
            place = NodePlace(
                node,
                num_nodes=request.num_nodes,
                rank_offset=node * request.ranks_per_node,
                world_size=request.num_nodes * request.ranks_per_node,
                master_addr=host,
                master_port=port,
                ranks=request.ranks_per_node,
                nodes=((host, request.ranks_per_node),) * request.num_nodes,
            )
            notes.append(
                f"rendezvous of the nodes at {host}:{rendezvous_port}; shown is node {node}"
                + ("" if request.node_rank is not None else ", which is agreed there")
                + "; MASTER_ADDR and MASTER_PORT are node 0's, chosen there"
            )
        notes.append(f"run directory {request.run_dir}")
        return Rendered(tuple(notes), self.node_processes(request, place).command_lines())

    def reserve(self, ranks: int, device: str) -> AbstractContextManager[object]:
        """Reserves nothing: each job has its own processes."""
        return nullcontext()

    def run(
        self,
        request: LaunchRequest,
        screen: MirrorScreen | None = None,
        *,
        nodes: Nodes | None = None,
        first: Round | None = None,
        limits: RestartLimits | None = None,
        on_stop: Callable[[int], None] | None = None,
    ) -> None:
        """Submit and wait."""
        self.submit(request, screen, nodes=nodes, first=first, limits=limits, on_stop=on_stop).wait()

    def submit(
        self,
        request: LaunchRequest,
        screen: MirrorScreen | None = None,
        *,
        nodes: Nodes | None = None,
        first: Round | None = None,
        limits: RestartLimits | None = None,
        on_stop: Callable[[int], None] | None = None,
        parent: WarmParent | None = None,
    ) -> Supervisor:
        """Start the ranks; `wait` restarts them within `limits`.

        They end with this process, and with the thread that calls this. Several nodes pass their rendezvous and its
        first result. If a `parent` is passed, the ranks are forked from it, and it outlives them.
        """
        kept_back = ("TORCHELASTIC_", JOIN_TOKEN)
        inherited = {name: value for name, value in self.environ.items() if not name.startswith(kept_back)}
        request = _with_limits(request, limits or RestartLimits())
        nodes = nodes or Alone(request)
        mirror = LogMirror(screen)
        found = preloads_of(request)
        supervisor = Supervisor(
            request=request,
            nodes=nodes,
            rank_group=RankGroup(
                inherited,
                self.python,
                preload=found.modules if found is not None and found.modules else None,
                parent=parent,
                frees_devices=request.device == "cuda",
                on_started=lambda member: mirror.follow(member.rank, member.process.log_path),
                door=nodes.door,
            ),
            render=lambda round_, slots: self.render_round(request, round_, slots),
            mirror=mirror,
            limits=limits or RestartLimits(),
            on_stop=on_stop,
        )
        try:
            supervisor.start(first)
        except BaseException:
            supervisor.close()
            raise
        return supervisor

    def render_round(self, request: LaunchRequest, round_: Round, slots: Sequence[int]) -> NodeProcesses:
        """The ranks of this node in a round; each uses the GPU of its slot, even after other slots were excluded."""
        request = replace(request, run_dir=round_.run_dir, attempt=round_.attempt)
        rendered = self.node_processes(request, round_.place, round_.restarts)
        if request.device != "cuda" or request.shares_gpus or list(slots) == list(range(len(slots))):
            return rendered
        names = gpu_names(self.environ.get("CUDA_VISIBLE_DEVICES"), max(slots) + 1)
        specs = [
            replace(spec, env=dict(spec.env) | {"CUDA_VISIBLE_DEVICES": names[slot]})
            for spec, slot in zip(rendered.processes, slots, strict=False)
        ]
        return replace(rendered, processes=tuple(specs))


def _with_limits(request: LaunchRequest, limits: RestartLimits) -> LaunchRequest:
    """How often a script is started again that no Trainer is used in, as torchrun tells it."""
    return replace(request, env={"TORCHELASTIC_MAX_RESTARTS": str(limits.max_restarts or 0)} | dict(request.env))


def preloads_of(request: LaunchRequest) -> Preloads | None:
    """What the warm parent of a run imports; None: it has none."""
    if not (request.warm and WarmParent.is_supported()):
        return None
    return preloads(program_file(request.command), request.preload or ALWAYS)


def on_shared_gpu(worker: WorkerEnv, gpus: int) -> dict[str, str]:
    """The variables that a rank on a shared GPU gets in place of those of a rank with its own GPU.

    NCCL refuses two ranks of one host on one GPU, and uses sockets between hosts. LOCAL_RANK names the GPU, for which
    scripts read it; this library reads the rank's place on its node from another variable.

    >>> found = on_shared_gpu(WorkerEnv(rank=3, local_rank=3, world_size=4, local_world_size=4), gpus=1)
    >>> found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"], found["DISTRIBUTED_LOCAL_PLACE"]
    ('0', '1', '3/4')
    """
    return {
        # A replacement rank in a later attempt is another host, also to the surviving ranks.
        "NCCL_HOSTID": f"{socket.gethostname()}-{worker.attempt}-rank-{worker.rank}",
        "LOCAL_RANK": str(worker.local_rank % max(1, gpus)),
        "LOCAL_WORLD_SIZE": str(min(max(1, gpus), worker.local_world_size)),
        LOCAL_PLACE: f"{worker.local_rank}/{worker.local_world_size}",
    }
