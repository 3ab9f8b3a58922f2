"""One `fit`: config → plan → processes → the trained model, in a world that a launcher made or in one that we make."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import engine_of, load_strategy
from distributed.core.env import WorkerEnv
from distributed.core.errors import ConfigError
from distributed.core.history import History
from distributed.core.plan import Decision, Plan
from distributed.core.protocol.rank_protocol import LauncherLink
from distributed.core.run_dir import RunDir
from distributed.data.source import Source
from distributed.launch.preflight import check_port, check_resume, check_run_dir, new_run_dir, next_attempt
from distributed.launch.request import LaunchRequest
from distributed.launch.run_lock import owned
from distributed.observe.observers import check_extras
from distributed.planner.hardware import Gpu, Hardware, probe_for, probe_hardware
from distributed.planner.memory import ModelSize
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.launch_id import launch_id
from distributed.runtime.session import Session
from distributed.strategies.data_parallel.batchnorm import has_batchnorm
from distributed.strategies.model.blocks import find_blocks
from distributed.train.callbacks.callback import Callback
from distributed.train.given_schedulers import is_made
from distributed.train.rank_job import RankJob
from distributed.train.task import Task
from distributed.trainers.agreement import check_alike
from distributed.trainers.launching import active_mlflow_run, check_checkpoint_dir, launch_job, record_run, refuse
from distributed.trainers.payload import write_payload
from distributed.trainers.trained_model import UntrainedTask, load_trained_state
from distributed.worker import line_for, meet, open_session, run_rank

_JOINED = itertools.count(1)  # fits of this process in a launcher's world; each after the first has its own folder


@dataclass(frozen=True)
class FitRequest:
    """Settings, task and data of one `fit`."""

    config: DistributedConfig
    task: Task
    train: Source
    evaluation: Source | None
    notes: tuple[Decision, ...] = ()  # what a trainer has decided before
    callbacks: tuple[Callback, ...] = ()

    @property
    def profile(self) -> JobProfile:
        return JobProfile(
            loader_batch_size=self.train.batch_size,
            loader_drop_last=self.train.drop_last,
            samples=self.train.samples,
            sampling=self.train.sampling,
            has_batchnorm=has_batchnorm(self.task.model),
            has_convolutions=any(isinstance(module, nn.Conv2d) for module in self.task.model.modules()),
            has_blocks=bool(find_blocks(self.task.model)),
            owns_optimizer=self.task.has_own_optimizers,
            owns_schedule=self.task.scheduler is not None,
            binds_schedule=is_made(self.task.scheduler),
            parameters=sum(parameter.numel() for parameter in self.task.model.parameters()),
            size=_size_of(self.task.model),
        )

    def plan(self, run_dir: str, world: WorkerEnv | None = None) -> Plan:
        """Made for the ranks that were asked for, then cut for those that are there: the global batch stays."""
        nominal = replace(world, world_size=world.nominal_ranks) if world and world.nominal_ranks else world
        mlflow_run = active_mlflow_run()
        hardware = _hardware() if world or self.config.address is None else probe_for(self.config)
        plan = make_plan(
            self.config, self.profile, hardware, run_dir=run_dir, world=nominal, active_mlflow_run=mlflow_run
        )
        plan = plan.with_decisions(first=self.notes)
        return plan if world is None else plan.for_world(world.world_size, world.num_nodes)

    def job(self, plan: Plan) -> RankJob:
        self.task.weigh_by(plan.loss_weighting)
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
    run_dir = world.run_dir or request.config.run_dir or new_run_dir()
    if world.run_dir and number > 1:
        run_dir = str(RunDir(world.run_dir).fit(number))
    rendezvous = meet(world, run_dir, request.config.collective_timeout_s)
    plan = request.plan(run_dir, rendezvous.env)
    line = line_for(plan, is_first=number == 1 and outlives_peers) if is_watched else None
    session = open_session(plan, world, line, rendezvous)
    if not world.run_dir:  # each rank has made up its own; some learn rank 0's where they meet
        run_dir = session.env.run_dir or session.share_text("run_dir", run_dir if session.is_main else None)
    plan = plan.in_dir(run_dir).for_world(session.world_size, session.env.num_nodes)
    if not session.env.restarts:  # later, some ranks come from the world before, and have been asked already
        check_alike(plan, session)
    check_extras(plan)
    followed = world.is_followed and number == 1  # our launcher shows the progress
    with ExitStack() as held:
        if session.is_main:
            if not world.run_dir:  # else our launcher holds it
                resumes = bool(plan.checkpoint.resume)
                refuse(check_run_dir(run_dir, resumes))
                token = launch_id(run_dir, session.env) if session.env.restarts else ""
                held.enter_context(owned(run_dir, resume=resumes, token=token))
            record_run(plan, request.config)
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
    if plan.is_replicated or not (on_all or session.is_main):
        return lambda checkpoint: None
    untrained = UntrainedTask(request.task, plan)
    return partial(untrained.restore_on_all, session=session) if on_all else untrained.restore


def fit_alone(request: FitRequest) -> History:
    """Start the ranks from this process; a single one runs right here, where a debugger and a profiler see it."""
    config, spans = request.config, engine_of(request.config).spans
    if config.num_nodes > 1 and not spans:
        raise ConfigError(
            f"num_nodes={config.num_nodes}, but this process was started alone",
            why="a script can start processes on its own machine only",
            do=f"on every node: distributed train --script {sys.argv[0] or 'train.py'} --num-nodes {config.num_nodes} "
            "--gpus-per-node … --master-addr HOST_OF_NODE_0",
        )
    run_dir = config.run_dir or new_run_dir()
    plan = request.plan(run_dir)
    check_extras(plan)
    load_strategy(plan.strategy, plan.is_bitwise)(plan).check(request.task)
    launch = LaunchRequest(
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
    )
    resumes = bool(plan.checkpoint.resume)
    at = [] if spans else check_resume(plan.checkpoint.resume)
    refuse([*check_run_dir(run_dir, resumes), *check_checkpoint_dir(plan), *at, *check_port(launch)])
    with owned(run_dir, resume=resumes):
        refuse(check_run_dir(run_dir, resumes))  # the one that was waited for may have begun since
        launch = replace(launch, attempt=next_attempt(run_dir))
        if plan.world_size > 1 or spans:
            return _launch(request.job(plan), config, launch)
        record_run(plan, config)
        session = open_session(plan, WorkerEnv(run_dir=run_dir, attempt=launch.attempt))
        return run_rank(request.job(plan), session, shows_progress=plan.observe.progress)


def _launch(job: RankJob, config: DistributedConfig, launch: LaunchRequest) -> History:
    """Send the job to new processes, wait for them, and take home what they trained."""
    history = launch_job(job.plan, config, launch, ".pt", partial(write_payload, job))
    load_trained_state(job.task, job.plan, history.checkpoint)
    return history


def _hardware() -> Hardware:
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
