"""make_plan: from settings to decisions. The one place that refuses a run, with every reason at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distributed.core.batch_plan import BatchPlan
from distributed.core.choices import Collectives, Device, ReplicaCheck
from distributed.core.collectives import choose_collectives
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.env import WorkerEnv, inherited_environ
from distributed.core.errors import PlanError, Problem
from distributed.core.plan import (
    CheckpointPlan,
    Decision,
    MlflowPlan,
    ObservePlan,
    OptimizerPlan,
    Plan,
    ReplicatePlan,
    SchedulePlan,
    ValidationPlan,
)
from distributed.core.plan_parts.compression import CompressionPlan
from distributed.core.registry import load_target
from distributed.core.run_dir import RunDir
from distributed.core.values import parse_best, parse_changes, parse_duration, parse_frequency, parse_interval
from distributed.planner.adoption import adopt, adopt_stages
from distributed.planner.decisions.accumulation import first_accumulation, plan_accumulation
from distributed.planner.decisions.buckets import BUCKET_CAP_MB, plan_buckets
from distributed.planner.decisions.compression import plan_compression
from distributed.planner.decisions.dev_run import as_dev_run
from distributed.planner.decisions.limits import plan_limits
from distributed.planner.decisions.network import add_network
from distributed.planner.decisions.precision import plan_precision
from distributed.planner.decisions.reproducible import plan_virtual_ranks
from distributed.planner.decisions.slow_rank import slow_rank_problems
from distributed.planner.decisions.speed import plan_compile, plan_speed
from distributed.planner.decisions.synchronization import plan_synchronization
from distributed.planner.hardware import Hardware
from distributed.planner.memory import ModelSize, too_little_memory
from distributed.planner.parallel import cut_for_pipeline, plan_parallel
from distributed.planner.resources import Resources, plan_resources, read_resources


@dataclass(frozen=True)
class JobProfile:
    """The facts about model and data that the planner uses."""

    loader_batch_size: int | None = None
    loader_drop_last: bool = False
    samples: int | None = None  # None: a stream
    evaluations: tuple[int | None, ...] = ()  # samples of what is evaluated; None: a stream
    sampling: str = ""  # how the user's own sampler is read, if that is a decision to print
    has_batchnorm: bool = False
    has_convolutions: bool = False
    has_blocks: bool = False  # that can be compiled one by one
    owns_optimizer: bool = False  # the user passed an optimizer
    owns_schedule: bool = False
    binds_schedule: bool = False  # ... and its scheduler has already read the optimizer's rates
    task: Mapping[str, str] = field(default_factory=dict)  # features of engines that it needs, and how it asks for each
    parameters: int = 0  # numbers in the model
    stages: int = 0  # into which an engine's own class has cut it; 0: it is whole
    size: ModelSize = field(default_factory=ModelSize)


_REPLICA_CHECKS: dict[bool | str, ReplicaCheck] = {True: "all", "parameters": "parameters", False: "nothing"}


def make_plan(
    config: DistributedConfig,
    profile: JobProfile,
    hardware: Hardware,
    *,
    run_dir: str,
    world: WorkerEnv | None = None,
    active_mlflow_run: str = "",
) -> Plan:
    """The plan of a run, or a PlanError with every problem. Called once in a `fit`.

    `world` is the world that another launcher has made; its size takes precedence over the config's.
    """
    if world is None:
        resources, decisions, problems = plan_resources(config, hardware)
    else:
        resources, decisions, problems = read_resources(config, hardware, world)
        decisions += _unused_run_dir(config, world, run_dir)
    config = adopt_stages(adopt(config, problems, resources.world_size), profile.stages, problems)
    if config.fast_dev_run:
        config, said = as_dev_run(config, evaluates=bool(profile.evaluations))
        decisions.append(said)
    plan = _plan_run(config, profile, hardware, resources, decisions=decisions, problems=problems)
    plan = plan_synchronization(
        config,
        plan,
        samples=profile.samples,
        task=profile.task,
        has_batchnorm=profile.has_batchnorm,
        decisions=decisions,
        problems=problems,
    )
    plan = replace(
        plan,
        run_dir=run_dir,
        memory=plan_compile(config, plan, profile.has_blocks, decisions, problems),
        speed=plan_speed(
            config,
            plan,
            hardware,
            has_convolutions=profile.has_convolutions,
            environ=inherited_environ(),
            decisions=decisions,
            problems=problems,
        ),
        checkpoint=_plan_checkpoints(config, run_dir),
        observe=_plan_observers(config, run_dir, active_mlflow_run),
    )
    if profile.has_batchnorm and plan.replicate.sync_batchnorm:
        reason = "statistics are taken over the micro-batches of all ranks, so the result equals that of one process"
        decisions.append(Decision("synchronized BatchNorm", reason, "sync_batchnorm"))
    problems += _schedule_problems(config, profile, plan.schedule)
    if profile.samples is None and plan.validation.is_by_epoch and plan.validation.every < 1:
        problems.append(
            Problem(
                f"val_check_interval={config.val_check_interval} of an epoch, and the training data is a stream",
                why="how many steps an epoch of a stream has is known only at its end",
                do="set val_check_interval to a number of steps, such as 200",
            )
        )
    problems += slow_rank_problems(config, plan, has_batchnorm=profile.has_batchnorm, world=world)
    plan_compression(config, plan, profile.task, decisions, problems)
    plan_buckets(config, plan, profile.task, decisions, problems)
    both: dict[str, Any] = {"decisions": decisions, "problems": problems}
    add_network(config, resources, hardware=hardware, engine=plan.strategy, world=world, **both)
    problems += too_little_memory(plan, profile.size, not profile.owns_optimizer, hardware)
    engine = ENGINES.entries[plan.strategy]
    if engine.plans:
        plan = replace(plan, engine=load_target(engine.plans)(config, profile, plan, decisions, problems))
    if problems:
        raise PlanError(problems)
    return plan.with_decisions(*decisions)


def _plan_run(
    config: DistributedConfig,
    profile: JobProfile,
    hardware: Hardware,
    resources: Resources,
    *,
    decisions: list[Decision],
    problems: list[Problem],
) -> Plan:
    """The plan without its speed and memory settings, which read it, and without file paths."""
    parallel = plan_parallel(
        config,
        resources.world_size,
        resources.num_nodes,
        device=resources.device,
        is_stream=profile.samples is None,
        has_batchnorm=profile.has_batchnorm,
        stages=profile.stages,
        task=profile.task,
        decisions=decisions,
        problems=problems,
    )
    if parallel.why_engine:
        decisions.append(Decision(f"backend {parallel.engine}", parallel.why_engine, "backend"))
    how: dict[str, Any] = {"engine": parallel.engine, "decisions": decisions, "problems": problems}
    batch = _plan_batch(config, profile, parallel.mesh.data_ranks, **how)
    batch, data = plan_limits(
        config, batch, profile.samples, profile.evaluations, decisions=decisions, problems=problems
    )
    precision = plan_precision(config, resources.device, hardware, ENGINES.entries[parallel.engine], decisions)
    if config.detect_anomaly and precision.kind == "fp16":
        reason = "under fp16 gradients overflow in the normal course of training, and the step is then skipped"
        decisions.append(Decision("anomalies are looked for in forward passes alone", reason, "mixed_precision"))
    is_bitwise = config.reproducible == "bitwise"
    return Plan(
        run_dir="",
        batch=batch,
        strategy=parallel.engine,
        mesh=parallel.mesh,
        num_nodes=resources.num_nodes,
        device=resources.device,
        shares_gpus=resources.shares_gpus,
        collectives=_plan_collectives(config, resources.device, decisions),
        collective_timeout_s=config.collective_timeout_s,
        threads_per_rank=1 if is_bitwise else max(1, hardware.cpu_cores // resources.ranks_per_node),
        seed=config.seed,
        epochs=config.epochs,
        max_steps=config.max_steps,
        max_time_s=None if config.max_time is None else parse_duration(config.max_time),
        on_nan=config.on_nan,
        detect_anomaly=config.detect_anomaly,
        slow_rank=config.slow_rank,
        slow_rank_wait_s=config.slow_rank_wait_s,
        loss_weighting=config.loss_weighting,
        iterable_split=config.iterable_split,
        sample_check=config.sample_check,
        is_dev_run=bool(config.fast_dev_run),
        data=data,
        precision=precision,
        optimizer=_plan_optimizer(config, profile, batch, decisions, problems),
        schedule=_plan_schedule(config),
        replicate=_plan_replicas(config, resources.world_size, is_native=ENGINES.entries[parallel.engine].is_native),
        shard=parallel.shard,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        memory=parallel.memory,
        workers=config.num_workers,
        validation=ValidationPlan(*parse_interval(config.val_check_interval or 1.0), config.sanity_val_steps),
        settings=config.model_dump(mode="json"),
    )


def _unused_run_dir(config: DistributedConfig, world: WorkerEnv, run_dir: str) -> list[Decision]:
    """A decision if the config asks for another run directory than the launcher's."""
    if not world.run_dir or not config.run_dir or os.path.abspath(config.run_dir) == os.path.abspath(run_dir):
        return []
    return [Decision(f"run directory {run_dir}", f"the launcher chose it; run_dir={config.run_dir} is not used")]


def _plan_schedule(config: DistributedConfig) -> SchedulePlan:
    return SchedulePlan(
        config.lr_schedule,
        config.warmup_steps,
        config.warmup_epochs,
        config.min_lr_ratio,
        config.scheduler_interval,
        config.scheduler_metric or "",
    )


def _plan_replicas(config: DistributedConfig, world_size: int, *, is_native: bool) -> ReplicatePlan:
    """`is_native`: gradients are reduced by torch's own steps, not by an engine with its own plan."""
    compression = CompressionPlan(
        config.compression, config.compression_ratio, config.compression_rank, config.compression_min_size
    )
    return ReplicatePlan(
        config.find_unused_parameters,
        config.static_graph,
        BUCKET_CAP_MB if config.bucket_cap_mb == "auto" else config.bucket_cap_mb,
        tunes_buckets=config.bucket_cap_mb == "auto" and world_size > 1,
        sync_batchnorm=config.sync_batchnorm and world_size > 1 and config.reproducible != "bitwise",
        check=_REPLICA_CHECKS[config.check_replicas],
        compression=compression if is_native else CompressionPlan(),
    )


def _schedule_problems(config: DistributedConfig, profile: JobProfile, schedule: SchedulePlan) -> list[Problem]:
    problems: list[Problem] = []
    if not schedule.is_constant and profile.owns_schedule:
        problems.append(
            Problem(
                "both a scheduler and lr_schedule/warmup settings are given",
                why="two schedules would set the same learning rate",
                do="keep the scheduler that you pass, or the settings",
            )
        )
    if config.lr_scaling != "none" and profile.binds_schedule:
        problems.append(
            Problem(
                f"lr_scaling={config.lr_scaling!r}, and a scheduler that is already bound to its optimizer",
                why="the scheduler remembers the learning rates from before the scaling",
                do="pass the scheduler as a function: scheduler=lambda optimizer: …",
            )
        )
    for name in ("scheduler_interval", "scheduler_metric"):
        if config.given(name) and not profile.owns_schedule:
            why = "without a scheduler the setting would have no effect"
            problems.append(Problem(f"{name} is set, but no scheduler is passed", why=why, do="leave it out"))
    return problems


def _plan_collectives(config: DistributedConfig, device: Device, decisions: list[Decision]) -> Collectives:
    chosen, why = choose_collectives(device, config.communication_backend)
    if config.communication_backend == "nccl" and chosen == "gloo":
        decisions.append(Decision("gloo collectives", why))
    return chosen


def _plan_batch(
    config: DistributedConfig,
    profile: JobProfile,
    world_size: int,
    *,
    engine: str,
    decisions: list[Decision],
    problems: list[Problem],
) -> BatchPlan:
    loader, asked = profile.loader_batch_size, config.batch_size
    if asked is not None and loader not in (None, asked):
        decisions.append(
            Decision(f"batch of {asked} a device", f"batch_size wins over the data loader's {loader}", "batch_size")
        )
    if asked is None and loader is None:
        problems.append(
            Problem(
                "no batch size is known",
                why="the data loader has none and batch_size is not set",
                do="set batch_size=32, say",
            )
        )
    if profile.sampling:
        decisions.append(Decision("sampling", profile.sampling))
    batch = BatchPlan(
        per_device=asked or loader or 1,
        ranks=world_size,
        accumulation=first_accumulation(config),
        drop_last=profile.loader_drop_last if config.drop_last is None else config.drop_last,
        of_stream=profile.samples is None,
    )
    if profile.samples == 0:
        problems.append(Problem("the training data is empty", do="check the dataset that you pass"))
    elif profile.samples is not None and batch.steps(profile.samples) == 0:
        cut = f"{batch.per_device} × {batch.ranks} ranks × {batch.accumulation} accumulated"
        problems.append(
            Problem(
                f"{profile.samples} samples cannot be split into batches of {batch.global_batch}",
                why=f"a global batch is {cut}, and drop_last=True drops an incomplete one: no step is left",
                do="set drop_last=False, or a smaller batch_size",
            )
        )
    batch = plan_accumulation(config, batch, engine, profile.samples, problems)
    batch = cut_for_pipeline(config, batch, decisions, problems)
    if config.reproducible != "bitwise":
        return batch
    return plan_virtual_ranks(
        config,
        batch,
        is_stream=profile.samples is None,
        has_batchnorm=profile.has_batchnorm,
        decisions=decisions,
        problems=problems,
    )


def _plan_optimizer(
    config: DistributedConfig, profile: JobProfile, batch: BatchPlan, decisions: list[Decision], problems: list[Problem]
) -> OptimizerPlan:
    ratio = batch.global_batch / (config.base_batch_size or batch.per_device)
    factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[config.lr_scaling]
    if factor != 1.0:
        base = config.base_batch_size or batch.per_device
        reason = f"the {config.lr_scaling} rule for a global batch of {batch.global_batch}, which is {ratio:g} × {base}"
        decisions.append(Decision(f"learning rate × {factor:.4g}", reason, "lr_scaling"))
    if profile.owns_optimizer:
        for name in ("learning_rate", "weight_decay", "momentum", "optimizer"):
            if config.given(name):
                problems.append(
                    Problem(
                        f"{name} is set ({config.source(name)}), but an optimizer is passed too",
                        why=f"the optimizer has its own {name}, so the setting would have no effect",
                        do=f"leave {name} out, or pass no optimizer",
                    )
                )
    return OptimizerPlan(
        name=config.optimizer,
        learning_rate=config.learning_rate * factor,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        clip_norm=config.gradient_clipping,
        clip_value=config.gradient_clip_value,
        lr_factor=factor,
    )


def _plan_checkpoints(config: DistributedConfig, run_dir: str) -> CheckpointPlan:
    every, unit = parse_frequency(config.checkpoint_frequency or 1)
    own_dir = RunDir(run_dir).passing if config.fast_dev_run else RunDir(run_dir).checkpoints
    return CheckpointPlan(
        dir=config.checkpoint_dir or str(own_dir),
        every=every if config.checkpoint_frequency or config.checkpoint_dir or config.keep_best else None,
        unit=unit,
        resume=config.resume_from_checkpoint,
        own_rates=config.resume_hyperparameters == "config",
        allowed=parse_changes(config.allow_change) if config.allow_change else (),
        asynchronous=config.checkpoint_async,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        best=":".join(parse_best(config.keep_best)) if config.keep_best else "",
        best_count=config.keep_best_k,
        certificate=0 if config.fast_dev_run else config.certificate_steps,
        ledger=config.sample_ledger,
    )


def _plan_observers(config: DistributedConfig, run_dir: str, active_mlflow_run: str) -> ObservePlan:
    tensorboard_dir = config.tensorboard_dir or (str(RunDir(run_dir).tensorboard) if config.tensorboard else "")
    mlflow = None
    if config.mlflow_tracking or config.mlflow_experiment:
        mlflow = MlflowPlan(config.mlflow_experiment or "Default", config.mlflow_tracking_uri or "", active_mlflow_run)
    return ObservePlan(config.log_every_n_steps, config.progress, config.csv, tensorboard_dir, mlflow)
