"""One `fit`: config → plan → processes → the trained model, in a world that a launcher made or in one that we make."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import engine_of, load_strategy, stages_of
from distributed.core.env import WorkerEnv
from distributed.core.errors import PlanError, TaskError
from distributed.core.history import History
from distributed.core.plan import Decision, Plan
from distributed.core.protocol.rank_protocol import LauncherLink
from distributed.core.run_dir import RunDir
from distributed.data.named_sources import NamedSources
from distributed.data.source import Source
from distributed.launch.preflight import check_port, check_resume, run_dir_of
from distributed.launch.request import LaunchRequest
from distributed.observe.observers import check_extras
from distributed.planner.decisions.network import announce_network, network_of
from distributed.planner.hardware import Gpu, Hardware, probe_for, probe_hardware
from distributed.planner.memory import ModelSize
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.rendezvous import line_for, meet, open_session
from distributed.runtime.session import Session
from distributed.strategies.data_parallel.batchnorm import has_batchnorm
from distributed.strategies.model.blocks import find_blocks
from distributed.train.callbacks.callback import Callback
from distributed.train.checks.given_objects import about_left, refuse_unreturnable
from distributed.train.given.schedulers import is_made
from distributed.train.given.tasks import asked_of_engine
from distributed.train.rank_job import RankJob
from distributed.train.task import Task
from distributed.trainers.agreement import check_alike
from distributed.trainers.launching import (
    active_mlflow_run,
    check_checkpoint_dir,
    launch_job,
    next_attempt_in,
    record_run,
    recorded_in_world,
    refuse_several_nodes,
)
from distributed.trainers.network_check import measure_network
from distributed.trainers.payload import write_payload
from distributed.trainers.trained.model import UntrainedTask, load_trained_state
from distributed.worker import run_rank

_JOINED = itertools.count(1)  # fits of this process in a launcher's world; each after the first has its own folder


@dataclass(frozen=True)
class FitRequest:
    """Settings, task and data of one `fit`."""

    config: DistributedConfig
    task: Task
    train: Source
    evaluation: NamedSources
    notes: tuple[Decision, ...] = ()  # what a trainer has decided before
    callbacks: tuple[Callback, ...] = ()
    is_trial: bool = False  # a short one before the run, of which nothing is kept
    evaluated: tuple[Source, ...] = ()  # by a loop of the user's own

    @property
    def profile(self) -> JobProfile:
        return JobProfile(
            loader_batch_size=self.train.batch_size,
            loader_drop_last=self.train.drop_last,
            samples=self.train.samples,
            evaluations=tuple(each.samples for each in (*self.evaluation.values(), *self.evaluated)),
            sampling=self.train.sampling,
            has_batchnorm=has_batchnorm(self.task.model),
            has_convolutions=any(isinstance(module, nn.Conv2d) for module in self.task.model.modules()),
            has_blocks=bool(find_blocks(self.task.model)),
            owns_optimizer=self.task.has_own_optimizers,
            owns_schedule=self.task.scheduler is not None,
            binds_schedule=is_made(self.task.scheduler),
            task=asked_of_engine(self.task),
            parameters=sum(parameter.numel() for parameter in self.task.model.parameters()),
            size=_size_of(self.task.model),
            stages=stages_of(self.task.model),
        )

    def plan(self, run_dir: str, world: WorkerEnv | None = None) -> Plan:
        """Made for the ranks that were asked for, then cut for those that are there: the global batch stays."""
        nominal = replace(world, world_size=world.nominal_ranks) if world and world.nominal_ranks else world
        mlflow_run = active_mlflow_run()
        hardware = local_hardware() if world or self.config.address is None else probe_for(self.config)
        plan = make_plan(
            self.config, self.profile, hardware, run_dir=run_dir, world=nominal, active_mlflow_run=mlflow_run
        )
        found = [p for callback in self.callbacks for p in callback.check(plan, self.task, bool(self.evaluation))]
        if found:
            raise TaskError(found)
        plan = self._uncaptured(plan).with_decisions(first=self.notes)
        if self.is_trial:
            plan = replace(plan, checkpoint=replace(plan.checkpoint, saves=False))
        return plan if world is None else plan.for_world(world.world_size, world.num_nodes)

    def _uncaptured(self, plan: Plan) -> Plan:
        """The plan without step capture, where the task's step needs Python each time."""
        why = self.task.why_not_captured
        if not why or plan.speed.capture == "off":
            return plan
        if plan.speed.capture == "on":
            raise PlanError("capture=True", why=why, do="leave it out")
        decision = Decision("steps are not captured", why)
        return plan.without_capture().with_decisions(*([decision] if plan.device == "cuda" else []))

    def job(self, plan: Plan) -> RankJob:
        self.task.begin_run(plan, self.train.samples)
        return RankJob(plan, self.task, self.train, self.evaluation, self.callbacks)


@dataclass(frozen=True)
class JoinedWorld:
    """This process as a rank of a world that a launcher made."""

    session: Session
    plan: Plan
    line: LauncherLink | None
    shows_progress: bool


@contextmanager
def join_world(
    request: FitRequest, world: WorkerEnv, *, outlives_peers: bool = True, is_watched: bool = True
) -> Iterator[JoinedWorld]:
    """Join the world of torchrun, horovodrun, srun, mpirun or our own command line, which holds its run directory.

    `outlives_peers`: whether this rank can continue in another world where this one breaks. `is_watched`: whether its
    launcher is to expect steps of it, until the end of a run is reported.
    """
    number = next(_JOINED)
    run_dir = world.run_dir or run_dir_of(request.config)
    if world.run_dir and number > 1:
        run_dir = str(RunDir(world.run_dir).fit(number))
    rendezvous = meet(world, run_dir, request.config.collective_timeout_s)
    plan = request.plan(run_dir, rendezvous.env)
    announce_network(request.config, plan.num_nodes, plan.device, rendezvous.env)
    line = line_for(plan, is_first=number == 1 and outlives_peers) if is_watched else None
    session = open_session(plan, world, line, rendezvous)
    if not world.run_dir:  # each rank has made up its own; some learn rank 0's where they meet
        run_dir = session.env.run_dir or session.share_text("run_dir", run_dir if session.is_main else None)
    plan = plan.in_dir(run_dir).for_world(session.world_size, session.env.num_nodes)
    if not session.env.restarts:  # later, some ranks come from the world before, and have been asked already
        check_alike(plan, session)
        if request.config.network_profile != "none" and session.env.num_nodes > 1:
            plan = plan.with_decisions(measure_network(session))
    check_extras(plan)
    followed = world.is_followed and number == 1  # our launcher shows the progress
    with recorded_in_world(plan, request.config, session.env, is_held=bool(world.run_dir)):
        yield JoinedWorld(session, plan, line, plan.observe.progress and not followed)


def fit_in_world(request: FitRequest, world: WorkerEnv) -> History:
    """Train as one of the ranks of a world that a launcher made."""
    with join_world(request, world) as joined:
        restore = whole_afterwards(request, joined.plan, joined.session)
        history = run_rank(
            request.job(joined.plan), joined.session, shows_progress=joined.shows_progress, line=joined.line
        )
        restore(history.checkpoint)
        return history


def whole_afterwards(request: FitRequest, plan: Plan, session: Session) -> Callable[[str], None]:
    """What makes the model whole again after a run that sharded it, on the ranks that are to have it.

    It is called before the strategy changes the model; what it returns is given the last checkpoint.
    """
    on_all = request.config.whole_model_on == "all"
    untrained = request.task.before_sharding = None if plan.is_replicated else UntrainedTask(request.task, plan)
    if untrained is None or not (on_all or session.is_main):
        return lambda checkpoint: None
    return partial(untrained.restore_on_all, session=session) if on_all else untrained.restore


def fit_alone(request: FitRequest) -> History:
    """Start the ranks from this process; a single one runs right here, where a debugger and a profiler see it."""
    config, spans = request.config, engine_of(request.config).spans
    refuse_several_nodes(config)
    run_dir = run_dir_of(config)
    plan = request.plan(run_dir)
    check_extras(plan)
    load_strategy(plan.strategy, plan.is_bitwise)(plan).check(request.task)
    starts = plan.world_size > 1 or spans or request.is_trial
    if starts:
        refuse_unreturnable(request.task, request.callbacks)
    launch = launch_of(config, plan, run_dir)
    resumes = bool(plan.checkpoint.resume)
    at = [] if spans else check_resume(plan.checkpoint.resume)
    problems = [*check_checkpoint_dir(plan), *at, *check_port(launch)]
    with next_attempt_in(run_dir, problems, resumes=resumes) as attempt:
        launch = replace(launch, attempt=attempt)
        if starts:
            return _launch(request.job(plan), config, launch, is_kept=not request.is_trial)
        record_run(plan, config)
        session = open_session(plan, WorkerEnv(run_dir=run_dir, attempt=launch.attempt))
        untrained = None if plan.is_replicated else UntrainedTask(request.task, plan)
        history = run_rank(request.job(plan), session, shows_progress=plan.observe.progress)
        if untrained is not None:
            untrained.restore_alone(history.checkpoint)
        return history


def launch_of(config: DistributedConfig, plan: Plan, run_dir: str) -> LaunchRequest:
    """The ranks that this process starts, which find their job in the run directory."""
    spans = engine_of(config).spans
    return LaunchRequest(
        command=("-m", "distributed.worker", run_dir),
        run_dir=run_dir,
        ranks_per_node=plan.ranks_per_node,
        num_nodes=plan.num_nodes,
        min_nodes=config.min_nodes if spans else None,
        max_nodes=config.max_nodes if spans else None,
        master_addr=config.master_addr,
        master_port=config.master_port,
        threads_per_rank=plan.threads_per_rank,
        device=plan.device,
        shares_gpus=plan.shares_gpus,
        gpus=torch.cuda.device_count() if plan.shares_gpus else 0,
        warm=config.warm_start,
        address=config.address,
        network=network_of(config, plan.num_nodes, plan.device),
    )


def _launch(job: RankJob, config: DistributedConfig, launch: LaunchRequest, *, is_kept: bool = True) -> History:
    """Send the job to new processes, wait for them, and take home what they trained if it `is_kept`."""
    history = launch_job(job.plan, config, launch, ".pt", partial(write_payload, job))
    if not is_kept:
        return history
    load_trained_state(job, history.checkpoint)
    if history.left_in_ranks:
        warnings.warn(about_left(history.left_in_ranks), stacklevel=4)
    return history


def local_hardware() -> Hardware:
    """What nvidia-smi reports; where it is missing, torch's count of the GPUs, which touches none of them."""
    hardware = probe_hardware()
    missing = torch.cuda.device_count() - len(hardware.gpus)
    return replace(hardware, gpus=(*hardware.gpus, *[Gpu("GPU")] * missing)) if missing > 0 else hardware


def _size_of(model: nn.Module) -> ModelSize:
    """Of what is sure to take its bytes: not of tensors of other kinds (quantized ones take fewer), and no gradients of
    embeddings whose are sparse."""
    sparse = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    plain = [p for p in model.parameters() if type(p.data) is torch.Tensor]
    trained = (p.nbytes for p in plain if p.requires_grad and id(p) not in sparse)
    return ModelSize(sum(p.nbytes for p in plain), sum(trained))
