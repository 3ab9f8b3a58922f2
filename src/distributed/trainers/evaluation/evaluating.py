"""One `validate`, `test` or `predict`: config → plan → processes → what they measured or predicted.

As in `fit`: in a plain script the ranks are started, in a world that a launcher made this process is one of them. What
ranks send back to a script lies in a folder of its own in the run directory.
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from distributed.core.atomic import make_private
from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import engine_of, load_strategy
from distributed.core.env import WorkerEnv
from distributed.core.plan import CheckpointPlan, ObservePlan, Plan
from distributed.core.run_dir import RunDir
from distributed.data.named_sources import NamedSources
from distributed.launch.preflight import new_run_dir
from distributed.launch.run_lock import owned
from distributed.planner.decisions.network import announce_network
from distributed.planner.hardware import probe_for
from distributed.planner.memory import ModelSize
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.rendezvous import meet, open_session
from distributed.runtime.session import Session
from distributed.strategies.model.blocks import find_blocks
from distributed.strategies.model.materialize import is_meta
from distributed.train.evaluation_job import EvaluationJob, run_evaluation
from distributed.train.predictions.reader import Predictions
from distributed.train.task import Task
from distributed.trainers.agreement import check_alike
from distributed.trainers.evaluation.models import model_in_world, task_for_evaluation, without_weights
from distributed.trainers.fitting import launch_of, local_hardware
from distributed.trainers.launching import launch_ranks, refuse_several_nodes
from distributed.trainers.payload import write_payload


@dataclass(frozen=True)
class EvaluationRequest:
    """Settings, task and data of one evaluation."""

    config: DistributedConfig  # as `build_evaluation_config` makes it
    task: Task
    sets: NamedSources
    kind: str  # "validate", "test" or "predict"
    role: str  # of the data, in messages
    to: str = ""  # where predictions are written; "": they are returned
    weights: str = ""  # the checkpoint that has the model's weights, where the model may not have them itself
    run_dir: str = ""  # of the run whose model it is

    @property
    def profile(self) -> JobProfile:
        counts = [source.samples for source in self.sets.values()]
        model = self.task.model
        return JobProfile(
            loader_batch_size=next((s.batch_size for s in self.sets.values() if s.batch_size is not None), None),
            samples=None if None in counts else max(count for count in counts if count is not None),
            has_convolutions=any(isinstance(module, nn.Conv2d) for module in model.modules()),
            has_blocks=bool(find_blocks(model)),
            owns_optimizer=True,  # there is none to be made
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            size=ModelSize(sum(parameter.nbytes for parameter in model.parameters()), 0),
        )

    def plan(self, run_dir: str, world: WorkerEnv | None = None) -> Plan:
        hardware = local_hardware() if world or self.config.address is None else probe_for(self.config)
        plan = make_plan(self.config, self.profile, hardware, run_dir=run_dir, world=world)
        return replace(
            plan,
            trains=False,
            memory=replace(plan.memory, compile=False, compile_whole=False),
            speed=replace(plan.speed, capture="off", fused_optimizer=False),
            replicate=replace(plan.replicate, check="nothing", sync_batchnorm=False),
            checkpoint=CheckpointPlan(dir=plan.checkpoint.dir),
            observe=ObservePlan(progress=plan.observe.progress),
        )

    def job(self, plan: Plan, task: Task, weights: str, run: str, to: str) -> EvaluationJob:
        predicts = self.kind == "predict"
        return EvaluationJob(plan, task, self.sets, self.role, predicts=predicts, to=to, run=run, weights=weights)


def evaluate_in_world(request: EvaluationRequest, world: WorkerEnv) -> Any:
    """Metrics, or predictions, on every rank of a world that torchrun, srun, mpirun or our command line made."""
    rendezvous = meet(world, world.run_dir, request.config.collective_timeout_s)
    plan = request.plan(world.run_dir or request.run_dir, rendezvous.env)
    announce_network(request.config, plan.num_nodes, plan.device, rendezvous.env)
    session = open_session(plan, world, None, rendezvous)
    plan = plan.for_world(session.world_size, session.env.num_nodes)
    check_alike(plan, session)
    first = session.share_text("evaluation", json.dumps([request.to, uuid.uuid4().hex]) if session.is_main else None)
    to, run = json.loads(first)
    run = world.run_dir or run  # the same in ranks that are started again
    found = _evaluate_here(request, plan, session, run, to)
    return Predictions(to) if to else found


def evaluate_alone(request: EvaluationRequest) -> Any:
    """The same in a process that was started alone: a single rank is this one, several are started."""
    config, spans = request.config, engine_of(request.config).spans
    refuse_several_nodes(config)
    folder = RunDir(request.run_dir or config.run_dir or new_run_dir()).evaluations(request.kind)
    plan = request.plan(str(folder))
    is_alone = plan.world_size == 1 and not spans
    weights = request.weights if is_meta(request.task.model) else ""
    if is_meta(request.task.model) and not weights:
        raise without_weights()
    task = task_for_evaluation(request.task, plan)
    load_strategy(plan.strategy)(plan).check(task)
    run = uuid.uuid4().hex
    if is_alone:
        found = _evaluate_here(request, plan, open_session(plan, WorkerEnv()), run, request.to)
        return Predictions(request.to) if request.to else found
    make_private(folder.path)
    to = request.to or (str(folder.predictions) if request.kind == "predict" else "")
    job = request.job(plan, task, weights, run, to)
    launch = launch_of(config, plan, str(folder))
    with owned(str(folder), resume=False):
        write = partial(write_payload, job)
        launch_ranks(plan, config, launch, ".pt", write=write, outcome=folder.evaluation)
    if request.to:
        return Predictions(to)
    if request.kind == "predict":
        return _taken_home(Path(to))
    found = json.loads(folder.evaluation.read_text())
    return found


def _evaluate_here(request: EvaluationRequest, plan: Plan, session: Session, run: str, to: str) -> Any:
    """As a rank in the process that has the user's own model."""
    with model_in_world(request.task, plan, session, request.weights) as (model, weights):
        task = task_for_evaluation(request.task, plan, model)
        return run_evaluation(request.job(plan, task, weights, run, to), session)


def _taken_home(folder: Path) -> Any:
    """All rows in this process; the files have done their work."""
    try:
        return Predictions(folder).load()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
