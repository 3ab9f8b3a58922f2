"""distributed train: run a training script as N ranks, on this machine or on several."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any, NoReturn

import typer

from distributed.cli import options as opt
from distributed.cli.program import about_preloads, has_input, read_command
from distributed.cli.settings import gather
from distributed.cli.train_launch import TrainJob, become_rank, launch, refuse, show_dry_run
from distributed.cli.words import ScriptCommand
from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import given_settings
from distributed.core.engines.engine import ENGINES, launching
from distributed.core.env import (
    DRY_RUN,
    JOIN_TOKEN,
    OVERRIDES,
    inherited_environ,
    join_token_in_env,
    worker_env,
)
from distributed.core.errors import ConfigError, Problem
from distributed.core.plan import Decision
from distributed.launch.preflight import (
    check_port,
    check_resume,
    check_run_dir,
    next_attempt,
    run_dir_of,
)
from distributed.launch.rendezvous.join_token import read_join_token
from distributed.launch.request import LaunchRequest
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
        _try_out(*program, config_path=config, words=settings or [], options=options, value=dry_run)
    job = _prepare(*program, config_path=config, words=settings or [], options=options, join_token=join_token)
    if option := "--local_rank" if local_rank_of_old else "--local-rank" if local_rank else "":
        if job.engine.spans:
            raise ConfigError(option, why="the cluster places the ranks", do="read LOCAL_RANK in the script")
        job = replace(job, request=replace(job.request, local_rank_option=option))
    world = worker_env()
    if world is not None and not any(job.config.given(name) for name in _SIZES):
        become_rank(job, world, dry_run is not None)
    elif dry_run is not None:
        show_dry_run(job)
    else:
        launch(job)


class TrainCommand(ScriptCommand):
    """`--dry-run` may have a value, and has none unless it is written with an equals sign."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [f"{word}=" if word == "--dry-run" else word for word in args])


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
        env={OVERRIDES: json.dumps(_given(config))} if config.given_values() else {},
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


def _try_out(
    command: tuple[str, ...],
    problems: list[Problem],
    *,
    config_path: str | None,
    words: list[str],
    options: dict[str, str | None],
    value: str,
) -> NoReturn:
    """Replace this process by the script, as rank 0 of a dry run of that many ranks."""
    ranks = int(value) if value.isdecimal() else 0
    if not ranks:
        why = "the value of --dry-run is a number of ranks, at least 1"
        problems.append(Problem(f"--dry-run={value}", why=why, do="--dry-run=8"))
    try:
        config = gather(config_path, words, options)
        if config.num_gpus not in (None, ranks):
            what = f"--dry-run={value}, but num_gpus={config.num_gpus}"
            problems.append(Problem(what, why="both set the number of ranks", do="leave num_gpus out"))
        config = config.merged(_sizes(config, ranks or 1), "--dry-run")
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    obstacles: list[Problem] = []
    whole = adopt(config, problems, ranks or None)
    plan_parallel(whole, ranks or 1, config.num_nodes, device="cpu", decisions=[], problems=obstacles)
    refuse(problems, obstacles, [])
    variables = {OVERRIDES: json.dumps(_given(config)), DRY_RUN: str(ranks)}
    os.execve(sys.executable, (sys.executable, *command), inherited_environ() | variables)


def _sizes(config: DistributedConfig, ranks: int) -> dict[str, int]:
    """The settings `num_nodes` and `num_gpus` for a dry run of that many ranks."""
    per_node = config.gpus_per_node
    nodes = max(1, ranks // per_node) if per_node and not config.given("num_nodes") else config.num_nodes
    return ({"num_nodes": nodes} if nodes > 1 else {}) | {"num_gpus": ranks}


def _threads(hardware: Hardware, ranks: int) -> int:
    return max(1, hardware.cpu_cores // ranks)


def _given(config: DistributedConfig) -> dict[str, list[object]]:
    return {name: [setting.value, setting.source] for name, setting in given_settings(config).items()}
