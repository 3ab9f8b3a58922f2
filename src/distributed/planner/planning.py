"""make_plan: from settings to decisions. The one place that refuses a run, with every reason at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from distributed.core.choices import Collectives, ReplicaCheck
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.env import WorkerEnv, inherited_environ
from distributed.core.errors import PlanError, Problem
from distributed.core.plan import (
    BatchPlan,
    CheckpointPlan,
    Decision,
    MlflowPlan,
    ObservePlan,
    OptimizerPlan,
    Plan,
    PrecisionPlan,
    ReplicatePlan,
    SchedulePlan,
)
from distributed.core.registry import load_target
from distributed.core.run_dir import RunDir
from distributed.core.values import parse_best, parse_changes, parse_frequency
from distributed.planner.adoption import adopt
from distributed.planner.hardware import Hardware
from distributed.planner.memory import ModelSize, too_little_memory
from distributed.planner.parallel import cut_for_pipeline, plan_parallel
from distributed.planner.reproducible import plan_virtual_ranks
from distributed.planner.resources import Resources, plan_resources, read_resources
from distributed.planner.speed import plan_compile, plan_speed


@dataclass(frozen=True)
class JobProfile:
    """The facts about model and data that the planner uses."""

    loader_batch_size: int | None = None
    loader_drop_last: bool = False
    samples: int | None = None  # None: a stream
    sampling: str = ""  # how the user's own sampler is read, if that is a decision to print
    has_batchnorm: bool = False
    has_convolutions: bool = False
    has_blocks: bool = False  # that can be compiled one by one
    owns_optimizer: bool = False  # the user passed an optimizer
    owns_schedule: bool = False
    binds_schedule: bool = False  # ... and its scheduler has already read the optimizer's rates
    parameters: int = 0  # numbers in the model
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
    config = adopt(config, problems, resources.world_size)
    plan = _plan_run(config, profile, hardware, resources, decisions=decisions, problems=problems)
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
        decisions=decisions,
        problems=problems,
    )
    if parallel.why_engine:
        decisions.append(Decision(f"backend {parallel.engine}", parallel.why_engine, "backend"))
    batch = _plan_batch(config, profile, parallel.mesh.data_ranks, decisions, problems)
    is_bitwise = config.reproducible == "bitwise"
    return Plan(
        run_dir="",
        batch=batch,
        strategy=parallel.engine,
        mesh=parallel.mesh,
        num_nodes=resources.num_nodes,
        device=resources.device,
        shares_gpus=resources.shares_gpus,
        collectives=_plan_collectives(config, resources.device, decisions, problems),
        collective_timeout_s=config.collective_timeout_s,
        threads_per_rank=1 if is_bitwise else max(1, hardware.cpu_cores // resources.ranks_per_node),
        seed=config.seed,
        epochs=config.epochs,
        max_steps=config.max_steps,
        on_nan=config.on_nan,
        loss_weighting=config.loss_weighting,
        iterable_split=config.iterable_split,
        sample_check=config.sample_check,
        precision=_plan_precision(config, resources.device, hardware, decisions),
        optimizer=_plan_optimizer(config, profile, batch, decisions, problems),
        schedule=_plan_schedule(config),
        replicate=_plan_replicas(config, resources.world_size),
        shard=parallel.shard,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        memory=parallel.memory,
        workers=config.num_workers,
        settings=config.model_dump(mode="json"),
    )


def _unused_run_dir(config: DistributedConfig, world: WorkerEnv, run_dir: str) -> list[Decision]:
    """A decision if the config asks for another run directory than the launcher's."""
    if not world.run_dir or not config.run_dir or os.path.abspath(config.run_dir) == os.path.abspath(run_dir):
        return []
    return [Decision(f"run directory {run_dir}", f"the launcher chose it; run_dir={config.run_dir} is not used")]


def _plan_schedule(config: DistributedConfig) -> SchedulePlan:
    return SchedulePlan(
        config.lr_schedule, config.warmup_steps, config.warmup_epochs, config.min_lr_ratio, config.scheduler_interval
    )


def _plan_replicas(config: DistributedConfig, world_size: int) -> ReplicatePlan:
    return ReplicatePlan(
        config.find_unused_parameters,
        config.static_graph,
        config.bucket_cap_mb,
        sync_batchnorm=config.sync_batchnorm and world_size > 1 and config.reproducible != "bitwise",
        check=_REPLICA_CHECKS[config.check_replicas],
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
    if config.given("scheduler_interval") and not profile.owns_schedule:
        why = "without a scheduler the setting would have no effect"
        problems.append(Problem("scheduler_interval is set, but no scheduler is passed", why=why, do="leave it out"))
    return problems


def _plan_collectives(
    config: DistributedConfig, device: str, decisions: list[Decision], problems: list[Problem]
) -> Collectives:
    asked = config.communication_backend
    if asked == "nccl" and device == "cpu":
        decisions.append(
            Decision(
                "gloo collectives", "communication_backend=nccl needs CUDA devices, and the ranks are CPU processes"
            )
        )
        return "gloo"
    if asked == "nccl" or asked == "gloo":
        return asked
    return "nccl" if device == "cuda" else "gloo"  # auto; and mpi, which is the world of an engine: torch has none


def _plan_batch(
    config: DistributedConfig, profile: JobProfile, world_size: int, decisions: list[Decision], problems: list[Problem]
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
        accumulation=config.gradient_accumulation_steps,
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


def _plan_precision(
    config: DistributedConfig, device: str, hardware: Hardware, decisions: list[Decision]
) -> PrecisionPlan:
    kind = config.mixed_precision
    if kind is False and config.bf16_parameters:
        decisions.append(Decision("mixed precision bf16", "bf16_parameters makes the model compute in bf16"))
        kind = "bf16"
    if kind is False:
        return PrecisionPlan()
    if kind is True:
        has_bf16 = device == "cpu" or hardware.has_bf16
        kind = "bf16" if has_bf16 else "fp16"
        reason = (
            "this device supports bf16, which needs no gradient scaling"
            if has_bf16
            else "this device does not support bf16; the loss is scaled"
        )
        decisions.append(Decision(f"mixed precision {kind}", reason, "mixed_precision"))
        if has_bf16 and (config.scaler_init_scale or config.scaler_growth_interval):
            decisions.append(
                Decision("no gradient scaler", "bf16 needs none; scaler settings are for fp16", "mixed_precision=fp16")
            )
    defaults = PrecisionPlan()
    return PrecisionPlan(
        kind,
        config.scaler_init_scale or defaults.scaler_init_scale,
        config.scaler_growth_interval or defaults.scaler_growth_interval,
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
        lr_factor=factor,
    )


def _plan_checkpoints(config: DistributedConfig, run_dir: str) -> CheckpointPlan:
    every, unit = parse_frequency(config.checkpoint_frequency or 1)
    return CheckpointPlan(
        dir=config.checkpoint_dir or str(RunDir(run_dir).checkpoints),
        every=every if config.checkpoint_frequency or config.checkpoint_dir else None,
        unit=unit,
        resume=config.resume_from_checkpoint,
        own_rates=config.resume_hyperparameters == "config",
        allowed=parse_changes(config.allow_change) if config.allow_change else (),
        asynchronous=config.checkpoint_async,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        best=":".join(parse_best(config.keep_best)) if config.keep_best else "",
        certificate=config.certificate_steps,
        ledger=config.sample_ledger,
    )


def _plan_observers(config: DistributedConfig, run_dir: str, active_mlflow_run: str) -> ObservePlan:
    tensorboard_dir = config.tensorboard_dir or (str(RunDir(run_dir).tensorboard) if config.tensorboard else "")
    mlflow = None
    if config.mlflow_tracking or config.mlflow_experiment:
        mlflow = MlflowPlan(config.mlflow_experiment or "Default", config.mlflow_tracking_uri or "", active_mlflow_run)
    return ObservePlan(config.log_every_n_steps, config.progress, tensorboard_dir, mlflow)
