"""The parts of a run behind a loop of the user's own: its world, strategy and turns, and their orderly end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from distributed.core.engines.engine import load_strategy
from distributed.core.env import WorkerEnv
from distributed.core.history import History
from distributed.core.plan import Decision, Plan
from distributed.core.protocol.process_owner import process_owner_of
from distributed.core.protocol.rank_protocol import Joined, LauncherLink
from distributed.core.run_dir import RunDir
from distributed.launch.preflight import check_run_dir, next_attempt
from distributed.launch.run_lock import owned
from distributed.observe.observers import check_extras
from distributed.observe.utilization import UtilizationSampler
from distributed.observe.watchers import Watchers
from distributed.runtime.rendezvous import open_session
from distributed.runtime.session import Session
from distributed.train.loop import Loop, Turns
from distributed.train.rank_job import RankJob, open_loop
from distributed.trainers.fitting import FitRequest, join_world, whole_afterwards
from distributed.trainers.launching import check_checkpoint_dir, record_run, refuse
from distributed.trainers.own_loop.refusals import refuse_for_loop
from distributed.worker import begin_heartbeat


@dataclass
class OpenRun:
    """A run whose turns the user's loop takes."""

    session: Session
    plan: Plan
    strategy: Any  # a Strategy whose steps are taken by hand
    loop: Loop
    turns: Turns
    line: LauncherLink | None
    held: ExitStack  # all that is left at the end, in the reverse order
    restore: Callable[[str], None]  # makes the model whole, from the last checkpoint

    def begin(self) -> None:
        """Take a checkpoint, or begin."""
        self.loop.begin()

    def end(self, history: History) -> None:
        """After the last turn, on every rank."""
        if self.line is not None:  # all ranks report it before any can fail in the script's own code
            self.line.tell(Joined(False, is_done=True))
            self.session.barrier("leaving the run")
        self.strategy.finish()
        if self.session.is_main:
            history.save(RunDir(self.plan.run_dir).history)
        self.close()
        self.restore(history.checkpoint)

    def close(self) -> None:
        """Also after a failure."""
        self.held.close()


def open_run(request: FitRequest, world: WorkerEnv | None, run_dir: str, *, has_several: bool = False) -> OpenRun:
    """Join the world, set up the strategy, and make the turns of the run. `has_several`: optimizers."""
    with ExitStack() as held:
        if world is not None:
            joined = held.enter_context(join_world(request, world, outlives_peers=False))
            session, plan, line, shows = joined.session, joined.plan, joined.line, joined.shows_progress
        else:
            plan, line = request.plan(run_dir), None
            session = _join_alone(request, plan, held)
            shows = plan.observe.progress
        has_models = isinstance(request.task.model, nn.ModuleDict)
        refuse_for_loop(plan, request.config, has_several=has_several, has_models=has_models)
        plan = _without_capture(plan)
        job = replace(request.job(plan), plan=plan)
        restore = whole_afterwards(request, plan, session)
        strategy = _set_up(job, session, held)
        heartbeat = begin_heartbeat(plan, session)
        held.callback(heartbeat.close)
        watchers = Watchers(shows)
        held.callback(watchers.close)
        host = process_owner_of(session.env)
        opened: AbstractContextManager[Loop] = open_loop(
            job,
            session,
            strategy,
            heartbeat=heartbeat,
            host=host,
            observer=lambda plan: watchers.observer(plan, session.env),
            utilization=UtilizationSampler(session.device.type, session.device.index or 0).percent,
            on_resumed=host.resumed,
            is_supervised=line is not None,
        )
        loop = held.enter_context(opened)
        held.callback(loop.close)
        return OpenRun(
            session=session,
            plan=plan,
            strategy=strategy,
            loop=loop,
            turns=loop.turns(),
            line=line,
            held=held.pop_all(),
            restore=restore,
        )
    raise AssertionError("an exit stack swallows no error")


def _join_alone(request: FitRequest, plan: Plan, held: ExitStack) -> Session:
    """A world of this process alone."""
    check_extras(plan)
    resumes = bool(plan.checkpoint.resume)
    held.enter_context(owned(plan.run_dir, resume=resumes))
    refuse([*check_run_dir(plan.run_dir, resumes), *check_checkpoint_dir(plan)])
    attempt = next_attempt(plan.run_dir)
    record_run(plan, request.config)
    return open_session(plan, WorkerEnv(run_dir=plan.run_dir, attempt=attempt))


def _set_up(job: RankJob, session: Session, held: ExitStack) -> Any:
    strategy = load_strategy(job.plan.strategy)(job.plan)
    strategy.take_steps_by_hand()
    strategy.check(job.task)
    session.take_place(job.plan.mesh)
    session.seed(job.plan.seed)
    held.callback(strategy.close)
    strategy.setup(job.task, session)
    return strategy


def _without_capture(plan: Plan) -> Plan:
    decision = Decision("steps are not captured", "each of them runs the code of your loop")
    return plan.without_capture().with_decisions(*([decision] if plan.device == "cuda" else []))
