"""distributed train: run a training script as N ranks, on this machine or on several."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import typer

from distributed.cli import options as opt
from distributed.cli.dry_run import overrides_of, refuse, try_out
from distributed.cli.program import about_plain_script, about_preloads, has_input, program_of, read_command
from distributed.cli.settings import gather
from distributed.cli.words import ScriptCommand
from distributed.core.atomic import make_private
from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import RunConfig
from distributed.core.engines.engine import ENGINES, Engine, launching
from distributed.core.env import (
    JOIN_TOKEN,
    OVERRIDES,
    WorkerEnv,
    inherited_environ,
    join_token_in_env,
    worker_env,
)
from distributed.core.errors import ConfigError, LaunchError, Problem
from distributed.core.plan import Decision
from distributed.core.run_dir import RunDir
from distributed.core.secrets import mask_arguments
from distributed.launch.base import launcher_of
from distributed.launch.local import LocalLauncher
from distributed.launch.node.command import rank_argv
from distributed.launch.node.stop_signals import Stopped
from distributed.launch.preflight import (
    check_port,
    check_resume,
    check_run_dir,
    next_attempt,
    run_dir_of,
)
from distributed.launch.rendezvous.elastic import elastic_nodes
from distributed.launch.rendezvous.join_token import read_join_token
from distributed.launch.rendezvous.nodes import News, Nodes, Round
from distributed.launch.request import LaunchRequest
from distributed.launch.run_lock import owned
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.observe.live import RunScreen
from distributed.planner.adoption import adopt
from distributed.planner.decisions.network import network_here, network_of
from distributed.planner.hardware import Hardware, probe_for, probe_hardware
from distributed.planner.parallel import plan_parallel
from distributed.planner.resources import plan_resources

_SIZES = ("num_gpus", "num_nodes", "gpus_per_node")


def train(
    context: typer.Context,
    settings: opt.Settings = None,
    script: opt.OptionalScript = None,
    module: opt.Module = None,
    num_gpus: opt.NumGpus = None,
    backend: opt.Backend = None,
    num_nodes: opt.NumNodes = None,
    gpus_per_node: opt.GpusPerNode = None,
    min_nodes: opt.MinNodes = None,
    max_nodes: opt.MaxNodes = None,
    node_rank: opt.NodeRank = None,
    master_addr: opt.MasterAddr = None,
    master_port: opt.MasterPort = None,
    join_token: opt.JoinToken = None,
    address: opt.Address = None,
    device: opt.Device = None,
    share_gpus: opt.ShareGpus = False,
    sharding: opt.Sharding = None,
    zero_stage: opt.ZeroStage = None,
    tensor_parallel: opt.TensorParallel = None,
    pipeline_parallel: opt.PipelineParallel = None,
    context_parallel: opt.ContextParallel = None,
    activation_checkpointing: opt.ActivationCheckpointing = None,
    cpu_offload: opt.CpuOffload = False,
    deepspeed_config: opt.DeepspeedConfig = None,
    offload_optimizer: opt.OffloadOptimizer = None,
    offload_parameters: opt.OffloadParameters = None,
    offload_dir: opt.OffloadDir = None,
    compression: opt.Compression = None,
    synchronization: opt.Synchronization = None,
    lora: opt.Lora = None,
    config: opt.ConfigFile = None,
    run_dir: opt.RunDirectory = None,
    dry_run: opt.DryRun = None,
    local_rank: opt.LocalRank = False,
    local_rank_of_old: opt.LocalRankOfOld = False,
) -> None:
    """Run a training script as N ranks: a script that uses this library, or any torch.distributed script.

    Settings given here win over those in --config, and these over what the script passes to its Trainer.
    All that have no option are given as KEY=VALUE: see `distributed config show`. What follows -- goes to the script.

    \b
    Examples:
      distributed train --script train.py --num-gpus 4
      distributed train --script train.py --num-gpus 2 epochs=3 mixed_precision=true -- --data-dir /data
      distributed train -m package.train --num-gpus 2 -- --data-dir /data
      distributed train --script train.py --num-nodes 2 --gpus-per-node 8 --master-addr node0   (on both nodes)
      distributed train --script train.py --num-nodes 4 --gpus-per-node 8 --backend ray --address auto   (on one)
      distributed train --script train.py --num-gpus 8 --backend fsdp --tensor-parallel 2 sequence_parallel=true
      distributed train --script train.py --dry-run=1024 --backend fsdp
    """
    options = {
        "num_gpus": num_gpus,
        "backend": backend,
        "num_nodes": num_nodes,
        "gpus_per_node": gpus_per_node,
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
        "address": address,
        "device": device,
        "share_gpus": "true" if share_gpus else None,
        "sharding": sharding,
        "zero_stage": zero_stage,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "context_parallel": context_parallel,
        "activation_checkpointing": activation_checkpointing,
        "cpu_offload": "true" if cpu_offload else None,
        "deepspeed_config": deepspeed_config,
        "offload_optimizer": offload_optimizer,
        "offload_parameters": offload_parameters,
        "offload_dir": offload_dir,
        "compression": compression,
        "synchronization": synchronization,
        "lora": lora,
        "run_dir": run_dir,
    }
    program = read_command(script, module, tuple(context.obj or ()))
    if dry_run:
        try_out(*program, config_path=config, words=settings or [], options=options, value=dry_run)
    job = _prepare(*program, config_path=config, words=settings or [], options=options, join_token=join_token)
    if option := "--local_rank" if local_rank_of_old else "--local-rank" if local_rank else "":
        if job.engine.spans:
            raise ConfigError(option, why="the cluster places the ranks", do="read LOCAL_RANK in the script")
        job = replace(job, request=replace(job.request, local_rank_option=option))
    world = worker_env()
    if world is not None and not any(job.config.given(name) for name in _SIZES):
        _become_rank(job, world, dry_run is not None)
    elif dry_run is not None:
        _show_dry_run(job)
    else:
        _launch(job)


class TrainCommand(ScriptCommand):
    """`--dry-run` may have a value, and has none unless it is written with an equals sign."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [f"{word}=" if word == "--dry-run" else word for word in args])


@dataclass(frozen=True)
class TrainJob:
    """A checked launch: settings, request, decisions and engine."""

    config: DistributedConfig
    request: LaunchRequest
    decisions: tuple[Decision, ...]
    planned: tuple[Decision, ...]  # for a Trainer in the program, of which nothing is known before it runs
    engine: Engine

    @property
    def told(self) -> list[str]:
        """What is decided, as it is printed."""
        if_so = f"(if {program_of(self.request.command)} uses a Trainer or distributed.start)"
        return [*map(str, self.decisions), *(f"{decision} {if_so}" for decision in self.planned)]


def _prepare(
    command: tuple[str, ...],
    problems: list[Problem],
    *,
    config_path: str | None,
    words: list[str],
    options: dict[str, str | None],
    join_token: str | None = None,
) -> TrainJob:
    """Everything that can be checked without starting anything, and all that is wrong in one error."""
    try:
        config = gather(config_path, words, options)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    hardware = probe_for(config) if worker_env() is None else probe_hardware()
    resources, decisions, obstacles = plan_resources(config, hardware)
    ranks, nodes = resources.world_size, resources.num_nodes
    whole = adopt(config, problems, ranks if worker_env() is None else None)  # the ranks adopt for themselves
    # A run that cannot be had is refused before it starts. Only the engine is taken: the script's `fit` has settings of
    # its own, and plans how its ranks share the work.
    planned: list[Decision] = []
    chosen = plan_parallel(whole, ranks, nodes, device=resources.device, decisions=planned, problems=obstacles).engine
    network = network_here(config, resources, hardware, chosen)
    obstacles += network.problems
    target = os.path.abspath(run_dir_of(config))
    request = LaunchRequest(
        command=command,
        run_dir=target,
        ranks_per_node=resources.ranks_per_node,
        num_nodes=resources.num_nodes,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        node_rank=config.node_rank,
        master_addr=config.master_addr,
        master_port=config.master_port,
        env={OVERRIDES: json.dumps(overrides_of(config))} if config.given_values() else {},
        attempt=next_attempt(target) if config.resumes else 0,
        device=resources.device,
        shares_gpus=resources.shares_gpus,
        gpus=len(hardware.gpus),
        warm=config.warm_start,
        address=config.address,
        has_input=has_input(),
        network=network_of(config, nodes, resources.device),
    ).for_engine(chosen, config)
    request = replace(request, threads_per_rank=_threads(hardware, request.ranks_per_node))
    request = replace(request, join_token=_join_token(join_token, request, problems))
    launch_problems = check_port(request)
    engine = launching(chosen, config)
    if not engine.spans:  # which reads on machines of its own
        launch_problems += check_resume(config.resumes and config.resume_from_checkpoint)
    # Several nodes know only after their rendezvous whether this begins a run.
    if request.most_nodes == 1 or engine.spans:
        launch_problems += check_run_dir(target, resume=config.resumes)
    refuse(problems, obstacles, launch_problems)
    ENGINES.require(chosen)
    preloads = [] if engine.spans else about_preloads(request)
    return TrainJob(config, request, (*decisions, *network.decisions, *preloads), tuple(planned), engine)


def _join_token(option: str | None, request: LaunchRequest, problems: list[Problem]) -> str:
    """The secret of a run over several nodes, as it was given; no setting, since those are written down."""
    if option is not None and request.most_nodes == 1:
        why = "a run on 1 node admits no other node"
        problems.append(Problem("--join-token, but num_nodes=1", why=why, do="leave --join-token out"))
    if request.most_nodes == 1:
        return ""
    source = JOIN_TOKEN if option is None else "--join-token"
    text = join_token_in_env() if option is None else option
    try:
        return read_join_token(text, source) if text else ""
    except ConfigError as error:
        problems.extend(error.problems)
        return ""


def _threads(hardware: Hardware, ranks: int) -> int:
    return max(1, hardware.cpu_cores // ranks)


def _show_dry_run(job: TrainJob) -> None:
    request = job.request
    for line in job.told:
        typer.echo(line)
    typer.echo(str(launcher_of(job.engine).render(request, RestartLimits.of(job.config))))


def _launch(job: TrainJob) -> None:
    with ExitStack() as held:
        _launch_owned(job, held)


def _launch_owned(job: TrainJob, held: ExitStack) -> None:
    """One node, or the first of several, has the run directory for itself while this lasts."""
    request, nodes, first = job.request, None, None
    resumes = job.config.resumes
    if request.most_nodes > 1 and not job.engine.spans:
        nodes, first = _join_rendezvous(job, held)
        request = replace(request, run_dir=first.run_dir, attempt=first.attempt)
    else:
        held.enter_context(owned(request.run_dir, resume=resumes))
        refuse([], [], check_run_dir(request.run_dir, resume=resumes))  # what was waited for may have begun since
        request = replace(request, attempt=next_attempt(request.run_dir))
    attempt_dir = RunDir(request.run_dir).attempt(request.attempt)
    typer.echo("\n".join([*job.told, f"logs of the ranks: {attempt_dir}"]), err=True)
    make_private(request.run_dir)
    if first is None or (first.place.node_rank == 0 and not first.restarts):
        RunConfig.of(job.config, request.command).write(request.run_dir)
    printed = [str(decision) for decision in (*job.decisions, *job.planned)]
    screen = RunScreen(request.run_dir, request.attempt, shows_progress=job.config.progress, printed=printed)
    limits = RestartLimits.of(job.config)
    try:
        if nodes is None:
            launcher_of(job.engine).run(request, screen, limits=limits, on_stop=screen.stopping)
        else:
            LocalLauncher().run(request, screen, nodes=nodes, first=first, limits=limits, on_stop=screen.stopping)
    except Stopped as stopped:
        typer.echo(f"{stopped}; logs and what was saved: {request.run_dir}", err=True)
        is_preempted = stopped.signal in (signal.SIGTERM, signal.SIGUSR1)
        raise typer.Exit(job.config.requeue_exit_code if is_preempted else stopped.exit_code) from None
    finally:
        screen.close()
    if text := about_plain_script(job.config, job.engine, request.command, request.run_dir):
        typer.echo(text, err=True)


def _become_rank(job: TrainJob, world: WorkerEnv, dry_run: bool) -> None:
    """Under a launcher that has made a world already, this process is one of its ranks."""
    command = rank_argv(sys.executable, job.request.command_of(world.local_rank))
    if world.is_main or dry_run:
        typer.echo(
            f"rank {world.rank} of {world.world_size}, started by {world.launcher}: no more are started [num_gpus]",
            err=True,
        )
    if dry_run:
        typer.echo(shlex.join(mask_arguments(command)))
        return
    network = network_of(job.config, world.num_nodes, job.request.device, world)(inherited_environ())
    os.execve(command[0], command, inherited_environ() | dict(job.request.env) | network)


def _join_rendezvous(job: TrainJob, held: ExitStack) -> tuple[Nodes, Round]:
    request = job.request
    host, port = request.rendezvous_endpoint
    typer.echo(f"rendezvous at {host}:{port}: waiting for {request.num_nodes} nodes", err=True)
    nodes = elastic_nodes(request, run_dir_given=job.config.run_dir is not None and not job.config.fast_dev_run)
    # Checked before other nodes write there; whether it matters is known after the rendezvous.
    resumes = job.config.resumes
    problems = check_run_dir(request.run_dir, resume=resumes, may_reuse=False)  # the attempt's number is agreed on
    first = nodes.gather(request.attempt)
    place = first.place
    if place.node_rank == 0 and not first.restarts and not problems:
        try:
            held.enter_context(owned(first.run_dir, resume=job.config.resumes))
        except LaunchError as used:
            problems = list(used.problems)
    if problems and not first.restarts:  # on any node: each writes the logs of its ranks
        host = first.hosts[place.node_rank]
        nodes.tell(News(place.node_rank, host, "failed", problems[0].what, exit_code=LaunchError.exit_code))
        nodes.leave(ok=False)
        raise LaunchError(problems)
    ranks = f"ranks {place.rank_offset} to {place.rank_offset + place.ranks - 1} of {place.world_size}"
    typer.echo(
        f"this is node {place.node_rank} of {', '.join(first.hosts)}, with {ranks if place.ranks else 'no ranks yet'},"
        f" rendezvous at {place.master_addr}:{place.master_port}",
        err=True,
    )
    return nodes, first
