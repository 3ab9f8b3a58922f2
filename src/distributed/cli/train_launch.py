"""What `distributed train` does with a checked job: show it, become a rank of a world, or start the ranks."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace

import typer

from distributed.cli.program import about_plain_script, program_of
from distributed.core.atomic import make_private
from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import RunConfig
from distributed.core.engines.engine import Engine
from distributed.core.env import (
    WorkerEnv,
    inherited_environ,
)
from distributed.core.errors import ConfigError, DistributedError, LaunchError, PlanError, Problem
from distributed.core.plan import Decision
from distributed.core.run_dir import RunDir
from distributed.core.secrets import mask_arguments
from distributed.launch.base import launcher_of
from distributed.launch.local import LocalLauncher
from distributed.launch.node.command import rank_argv
from distributed.launch.node.stop_signals import Stopped
from distributed.launch.preflight import (
    check_run_dir,
    next_attempt,
)
from distributed.launch.rendezvous.elastic import elastic_nodes
from distributed.launch.rendezvous.nodes import News, Nodes, Round
from distributed.launch.request import LaunchRequest
from distributed.launch.run_lock import owned
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.observe.live import RunScreen
from distributed.planner.decisions.network import network_of


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


def refuse(settings: list[Problem], obstacles: list[Problem], launch: list[Problem]) -> None:
    """One error with all problems, of the kind of the first."""
    kinds: list[tuple[type[DistributedError], list[Problem]]] = [
        (ConfigError, settings),
        (PlanError, obstacles),
        (LaunchError, launch),
    ]
    for kind, problems in kinds:
        if problems:
            raise kind([*settings, *obstacles, *launch])


def show_dry_run(job: TrainJob) -> None:
    request = job.request
    for line in job.told:
        typer.echo(line)
    typer.echo(str(launcher_of(job.engine).render(request, RestartLimits.of(job.config))))


def launch(job: TrainJob) -> None:
    """Start the ranks of this node, and wait for the run's end."""
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


def become_rank(job: TrainJob, world: WorkerEnv, dry_run: bool) -> None:
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
