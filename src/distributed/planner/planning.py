"""make_plan: from wishes to decisions. The one place that says no, with every reason at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from distributed.core.config import DistributedConfig
from distributed.core.engines import ENGINES
from distributed.core.env import WorkerEnv
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
from distributed.core.values import parse_best, parse_changes, parse_frequency
from distributed.planner.deepspeed_adoption import adopt
from distributed.planner.hardware import Hardware
from distributed.planner.parallel import cut_for_pipeline, plan_parallel
from distributed.planner.reproducible import plan_leaves
from distributed.planner.resources import Resources, plan_resources, too_few_gpus
from distributed.planner.speed import plan_compile, plan_speed


@dataclass(frozen=True)
class JobProfile:
    """What the planner must know of the model and the data."""

    loader_batch_size: int | None = None
    loader_drop_last: bool = False
    samples: int | None = None  # None: a stream
    sampling: str = ""  # how the user's own sampler is read, when that is worth saying
    has_batchnorm: bool = False
    has_convolutions: bool = False
    has_blocks: bool = False  # that can be compiled one by one
    owns_optimizer: bool = False  # the user passed an optimizer
    owns_schedule: bool = False
    binds_schedule: bool = False  # ... and its scheduler has already read the optimizer's rates
    parameters: int = 0  # numbers in the model


_REPLICA_CHECKS: dict[bool | str, str] = {True: "all", "parameters": "parameters", False: "nothing"}


def make_plan(
    config: DistributedConfig,
    profile: JobProfile,
    hardware: Hardware,
    *,
    run_dir: str,
    world: WorkerEnv | None = None,
    active_mlflow_run: str = "",
) -> Plan:
    """The plan of a run, or a PlanError with everything that stands in its way.

    `world` is the world that another launcher has made already; its size wins over the config's.
    """
    resources, decisions, problems = plan_resources(config, hardware)
    if world is not None:
        resources, decisions, problems = _join(world, config, hardware, resources, decisions, run_dir)
    world_size = world.world_size if world else resources.world_size
    config = adopt(config, problems, world_size)

    parallel = plan_parallel(
        config,
        world_size,
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
    batch = cut_for_pipeline(config, batch, decisions, problems)
    bitwise = config.reproducible == "bitwise"
    if bitwise:
        batch = plan_leaves(
            config,
            batch,
            is_stream=profile.samples is None,
            has_batchnorm=profile.has_batchnorm,
            decisions=decisions,
            problems=problems,
        )
    syncs_batchnorm = config.sync_batchnorm and world_size > 1 and not bitwise
    plan = Plan(
        run_dir=run_dir,
        batch=batch,
        strategy=parallel.engine,
        mesh=parallel.mesh,
        num_nodes=resources.num_nodes,
        device=resources.device,
        shares_gpus=config.share_gpus and resources.device == "cuda" and resources.ranks_per_node > len(hardware.gpus),
        collectives=_plan_collectives(config, resources.device, decisions, problems),
        collective_timeout_s=config.collective_timeout_s,
        threads_per_rank=1 if bitwise else max(1, hardware.cpu_cores // resources.ranks_per_node),
        seed=config.seed,
        epochs=config.epochs,
        max_steps=config.max_steps,
        on_nan=config.on_nan,
        loss_weighting=config.loss_weighting,
        iterable_split=config.iterable_split,
        sample_check=config.sample_check,
        precision=_plan_precision(config, resources.device, hardware, decisions),
        optimizer=_plan_optimizer(config, profile, batch, decisions, problems),
        schedule=SchedulePlan(
            config.lr_schedule,
            config.warmup_steps,
            config.warmup_epochs,
            config.min_lr_ratio,
            config.scheduler_interval,
        ),
        replicate=ReplicatePlan(
            config.find_unused_parameters,
            config.static_graph,
            config.bucket_cap_mb,
            syncs_batchnorm,
            _REPLICA_CHECKS[config.check_replicas],
        ),
        shard=parallel.shard,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        memory=parallel.memory,
        workers=config.num_workers,
        checkpoint=_plan_checkpoints(config, run_dir),
        observe=_plan_observers(config, run_dir, active_mlflow_run),
        settings=config.model_dump(mode="json"),
    )
    plan = replace(
        plan,
        memory=plan_compile(config, plan, profile.has_blocks, decisions, problems),
        speed=plan_speed(config, plan, hardware, profile.has_convolutions, os.environ, decisions, problems),
    )
    if profile.has_batchnorm and syncs_batchnorm:
        reason = "statistics over the whole micro-batch of all ranks, so that the result is that of one process"
        decisions.append(Decision("synchronized BatchNorm", reason, "sync_batchnorm"))
    problems += _schedule_problems(config, profile, plan.schedule)
    engine = ENGINES.entries[parallel.engine]
    if engine.plans:
        plan = replace(plan, engine=load_target(engine.plans)(config, profile, plan, decisions, problems))
    if problems:
        raise PlanError(problems)
    return replace(plan, decisions=tuple(decisions))


def _join(
    world: WorkerEnv,
    config: DistributedConfig,
    hardware: Hardware,
    asked: Resources,
    decisions: list[Decision],
    run_dir: str,
) -> tuple[Resources, list[Decision], list[Problem]]:
    """The same for a world that is there already: what the config asks otherwise is not used, and that is said."""
    if config.num_gpus not in (None, world.world_size):
        why = f"{world.launcher} started them; num_gpus={config.num_gpus} is not used"
        decisions = [*decisions, Decision(f"{world.world_size} ranks", why)]
    else:
        decisions = [d for d in decisions if d.override != "num_gpus"]
    if world.run_dir and config.run_dir and os.path.abspath(config.run_dir) != os.path.abspath(run_dir):
        why = f"the launcher's; run_dir={config.run_dir} is not used"
        decisions.append(Decision(f"run directory {run_dir}", why))
    ranks = world.local_world_size
    problems = [] if config.share_gpus else too_few_gpus(asked.device, ranks, hardware, world.launcher)
    resources = Resources(asked.device, world.num_nodes, -(-world.world_size // world.num_nodes))
    return resources, decisions, problems


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
        why = "it would have no effect"
        problems.append(Problem("scheduler_interval is set, but no scheduler is passed", why=why, do="leave it out"))
    return problems


def _plan_collectives(
    config: DistributedConfig, device: str, decisions: list[Decision], problems: list[Problem]
) -> str:
    asked = config.communication_backend
    if asked in ("auto", "mpi"):  # MPI is the engine's, whose own world it is; torch has none
        return "nccl" if device == "cuda" else "gloo"
    if asked == "nccl" and device == "cpu":
        decisions.append(
            Decision(
                "gloo collectives", "communication_backend=nccl needs CUDA devices, and the ranks are CPU processes"
            )
        )
        return "gloo"
    return asked


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
    return batch


def _plan_precision(
    config: DistributedConfig, device: str, hardware: Hardware, decisions: list[Decision]
) -> PrecisionPlan:
    kind = config.mixed_precision
    if kind is False and config.bf16_parameters:
        decisions.append(Decision("mixed precision bf16", "parameters in bf16 are computed with in bf16"))
        kind = "bf16"
    if kind is False:
        return PrecisionPlan()
    if kind is True:
        has_bf16 = device == "cpu" or hardware.has_bf16
        kind = "bf16" if has_bf16 else "fp16"
        reason = (
            "this device has it, and it needs no gradient scaling"
            if has_bf16
            else "this device has no bf16; gradients are scaled"
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
        reason = f"the {config.lr_scaling} rule, for a global batch {batch.global_batch} of {ratio:g} × {base}"
        decisions.append(Decision(f"learning rate × {factor:.4g}", reason, "lr_scaling"))
    if profile.owns_optimizer:
        for name in ("learning_rate", "weight_decay", "momentum", "optimizer"):
            if config.given(name):
                problems.append(
                    Problem(
                        f"{name} is set ({config.source(name)}), but an optimizer is passed too",
                        why="the optimizer has its own, so the setting would have no effect",
                        do=f"leave {name} out, or pass no optimizer",
                    )
                )
    return OptimizerPlan(
        config.optimizer,
        config.learning_rate * factor,
        config.weight_decay,
        config.momentum,
        config.gradient_clipping,
        factor,
    )


def _plan_checkpoints(config: DistributedConfig, run_dir: str) -> CheckpointPlan:
    every, unit = parse_frequency(config.checkpoint_frequency or 1)
    return CheckpointPlan(
        dir=config.checkpoint_dir or os.path.join(run_dir, "checkpoints"),
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
    tensorboard_dir = config.tensorboard_dir or (os.path.join(run_dir, "tensorboard") if config.tensorboard else "")
    mlflow = None
    if config.mlflow_tracking or config.mlflow_experiment:
        mlflow = MlflowPlan(config.mlflow_experiment or "Default", config.mlflow_tracking_uri or "", active_mlflow_run)
    return ObservePlan(config.log_every_n_steps, config.progress, tensorboard_dir, mlflow)
