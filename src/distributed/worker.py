"""The root of one rank: a RankJob and this rank's place become a session, a strategy and a loop."""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distributed.core.atomic import write_private
from distributed.core.engines.engine import ENGINES, load_strategy
from distributed.core.env import WorkerEnv, ticket_in_env, worker_env
from distributed.core.errors import CannotGoOnError
from distributed.core.history import History
from distributed.core.plan import Plan
from distributed.core.protocol.failure import is_collateral
from distributed.core.protocol.heartbeat import Phase
from distributed.core.protocol.process_owner import ProcessOwner, process_owner_of
from distributed.core.protocol.rank_protocol import Broke, Joined, LauncherLink, Lost, Resumed
from distributed.core.protocol.ticket import Ticket
from distributed.core.run_dir import RunDir
from distributed.observe.live import RunScreen, Ticker
from distributed.observe.observers import Observers, observers_for
from distributed.observe.utilization import UtilizationSampler
from distributed.runtime.abort.sockets import CAN_SHUT_DOWN
from distributed.runtime.agent_line import launcher_line
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.rendezvous import Rendezvous, find_rendezvous
from distributed.runtime.session import Session
from distributed.runtime.shutdown import defer_signals_to_launcher
from distributed.runtime.world import CollectiveError, abandon_world, leave_world
from distributed.strategies.base import Strategy
from distributed.train.checks.given_objects import GivenObjects
from distributed.train.checks.user_state import take_over
from distributed.train.evaluation_job import EvaluationJob, run_evaluation
from distributed.train.job_reading import load_job
from distributed.train.loop import LeftWorld, Loop
from distributed.train.rank_job import RankJob, open_loop
from distributed.train.resume.survivor_state import SurvivorState, hand_over, take_model
from distributed.train.stragglers.delay import replacer

_LEAVE_S = 60.0  # for the launcher of a rank whose world broke to have all ranks leave it
_TOGETHER_S = 30.0  # for all ranks that leave at the same step to end it
_LOOK_EVERY_S = 0.01


def meet(env: WorkerEnv, run_dir: str, timeout_s: float) -> Rendezvous:
    """Where the ranks of this world meet, and what rank 0 says there of the run."""
    return Rendezvous(env) if dist.is_initialized() else find_rendezvous(env, run_dir, timeout_s)


def open_session(
    plan: Plan, env: WorkerEnv, line: LauncherLink | None = None, meeting: Rendezvous | None = None
) -> Session:
    """Join the world. With a line to the launcher: or the one after it, should it break while the ranks meet.

    `meeting` is that of this world, where it was asked for already.
    """
    while True:
        try:
            meeting = meeting or meet(env, plan.run_dir, plan.collective_timeout_s)
            env = meeting.env
            return _join(plan, env, line, meeting.listener)
        except Exception as failed:
            if line is None or not line.regroups or not is_collateral(failed):
                raise
            if not env.restarts and not line.is_cut_off(env.attempt):  # a first rendezvous that failed is not retried
                raise
            env, meeting = next_world(line, env.attempt, str(failed)), None


def _join(plan: Plan, env: WorkerEnv, line: LauncherLink | None, listener: socket.socket | None) -> Session:
    """The launcher can end the wait for the others, and later any collective."""
    how: dict[str, Any] = {"device": plan.device, "collectives": plan.collectives, "listener": listener}
    how["shares_gpus"] = plan.shares_gpus
    is_coordinated = plan.collectives != "nccl" or env.num_nodes == 1  # a launcher closes the gates of its node only
    how["regroups"] = line is not None and line.regroups and is_coordinated
    if line is not None:
        how["opening"] = line.on_cut_off
        how["is_over"] = lambda: line.is_cut_off(env.attempt)
    session = Session.open(env, timeout_s=plan.collective_timeout_s, **how)
    if line is not None:
        line.on_close(env.attempt, session.close_gate)
        line.on_cut_off(session.cut_off)
        if line.is_cut_off(env.attempt):  # the message came during the rendezvous
            session.cut_off()
    return session


def next_world(line: LauncherLink, attempt: int, message: str, *, holds: bool = False) -> WorkerEnv:
    """Leave the world that broke, and wait for the next one, of survivors and new ranks."""
    line.cut_off()
    abandon_world()
    line.tell(Lost(attempt, message, holds))
    env = line.next_world(attempt)
    if env is None:
        raise CollectiveError("the launcher of this rank is gone")
    return env


def run_rank(
    job: RankJob, session: Session, *, shows_progress: bool, line: LauncherLink | None = None, gives_back: bool = True
) -> History:
    """Train this rank's part; what it returns is the same on every rank.

    With a link to its launcher, a rank that loses a peer keeps its state and continues in the next world. With
    `gives_back`, the ranks gather the model afterwards for the caller.
    """
    given = None if gives_back or not session.is_main else GivenObjects(job.task, job.train, job.callbacks)
    held: SurvivorState | None = None
    model_is_stale = False  # its model and optimizer are those of a run that is gone
    watchers = Watchers(shows_progress)
    try:
        while True:
            outcome = _run_world(
                job,
                session,
                held=held,
                model_is_stale=model_is_stale,
                watchers=watchers,
                line=line,
                gives_back=gives_back,
                given=given,
            )
            if isinstance(outcome, History):
                return outcome
            assert line is not None
            model_is_stale = outcome.held is None and (outcome.had_begun or model_is_stale)
            if model_is_stale and line.replaces and not outcome.follows:
                raise CannotGoOnError(f"rank {session.rank} lost its world", why=outcome.message)
            held = outcome.held
            with defer_signals_to_launcher():
                env = next_world(line, session.env.attempt, outcome.message, holds=held is not None)
                session = open_session(job.plan, env, line)
            job = replace(job, plan=job.plan.for_world(session.world_size, session.env.num_nodes))
    except Exception:  # the script may deal with it, and end well; not so where it ended itself in mid-run
        if line is not None:
            line.tell(Joined(False))
        raise
    finally:
        watchers.close()


@dataclass(frozen=True)
class WorldLost:
    """How a world ended for a rank that survives it."""

    held: SurvivorState | None
    had_begun: bool
    message: str
    follows: bool = False  # whether another rank held what this one would continue with


def _run_world(
    job: RankJob,
    session: Session,
    *,
    held: SurvivorState | None,
    model_is_stale: bool,
    watchers: Watchers,
    line: LauncherLink | None,
    gives_back: bool,
    given: GivenObjects | None,
) -> History | WorldLost:
    """One world of this rank, from joining it to the end of the run or of the world."""
    plan, task, env = job.plan, job.task, session.env
    strategy, host = load_strategy(plan.strategy, plan.is_bitwise)(plan), process_owner_of(env)
    loop: Loop | None = None
    heartbeat: Heartbeat | None = None
    is_touched = False  # whether an abort may have left anything in the weights, which rank 0 sends to all
    try:
        if line is not None:  # the launcher watches this rank from here on; it has made the run directory
            heartbeat = begin_heartbeat(plan, session)
        handed_over = None
        if line is not None and line.regroups and env.restarts:
            handed_over = hand_over(session, held)
            if handed_over is None and model_is_stale:
                raise CannotGoOnError(f"rank {session.rank} lost its world", why="no rank that is left holds the run")
        if handed_over is not None:
            held = SurvivorState(handed_over.step, handed_over.tree)
            session.take_weights_as_alike()
            take_model(task.model, handed_over.tree["model"])  # what the strategy begins with is sent from rank 0
            take_over(task, handed_over.tree)
        session.take_place(plan.mesh)
        session.seed(plan.seed)
        is_touched = session.gate is not None and handed_over is None
        strategy.setup(task, session)
        if heartbeat is None:  # rank 0 has looked at the run directory before any rank came this far
            heartbeat = begin_heartbeat(plan, session)
        if line is not None and line.regroups and _is_exposed(plan, session, strategy):
            line.tell(Joined(False, plan.legal_sizes, in_run=True))
            line.on_cut_off(lambda: None)  # an abort would send its peers garbage, and this rank is ended anyway
        with open_loop(
            job,
            session,
            strategy,
            heartbeat=heartbeat,
            host=host,
            observer=lambda plan: watchers.observer(plan, session),
            utilization=UtilizationSampler(session.device.type, session.device.index or 0).percent,
            on_resumed=_teller(line, host, session),
            on_paces=replacer(plan, session, line),
            asked_to_leave=lambda: line is not None and _asked_to_leave(line, env.attempt, strategy),
            is_supervised=line is not None,
            given=given,
        ) as loop:
            loop.begin(handed_over)
            held = handed_over = None  # a second copy of the state on every rank that was given it
            history = loop.run()
        host.close()
        _settle(session, line)
        if gives_back:
            strategy.finish()
        if session.is_main:
            history.save(RunDir(plan.run_dir).history)
        return history
    except Exception as failed:
        if loop is not None:
            loop.failed(failed)
        if line is None or not line.regroups or not _is_of_world(failed, session):
            raise
        _come_to_rest(session, line, failed)
        _write_down(failed, RunDir(plan.run_dir).attempt(env.attempt).lost(session.rank))
        had_begun = loop is not None and loop.has_begun
        holds = loop.held() if loop is not None and had_begun else held
        return WorldLost(holds, had_begun or is_touched, str(failed), follows=strategy.is_follower)
    finally:
        if loop is not None:
            loop.close()
        strategy.close()
        if heartbeat is not None:
            heartbeat.close()


def _is_of_world(failed: Exception, session: Session) -> bool:
    """Whether it is the world's end that a rank sees; after an abort, anything may come of the numbers it reads."""
    is_aborted = session.gate is not None and session.gate.is_closed
    return isinstance(failed, LeftWorld) or is_collateral(failed) or is_aborted


def _is_exposed(plan: Plan, session: Session, strategy: Strategy) -> bool:
    """Whether an abort could change this rank's state: it has peers on NCCL, and no gate before its steps."""
    is_alone = session.world_size == 1 and session.gate is None
    return plan.collectives == "nccl" and not is_alone and not strategy.is_gated


def _come_to_rest(session: Session, line: LauncherLink, failed: Exception) -> None:
    """Abort what runs on the device, once no peer can take what the abort sends it for gradients.

    Either all ranks have ended the step at which they leave, or the launcher has had them close their gates.
    """
    if session.gate is None:
        return
    with defer_signals_to_launcher():
        if not (isinstance(failed, LeftWorld) and session.all_have_ended(_TOGETHER_S)):
            session.close_gate()
            _await_leave(session, line, str(failed))
        session.come_to_rest()


def _await_leave(session: Session, line: LauncherLink, message: str) -> None:
    attempt, deadline = session.env.attempt, time.monotonic() + _LEAVE_S
    line.tell(Broke(attempt, message))
    while not line.is_cut_off(attempt):
        if time.monotonic() > deadline:
            why = f"the launcher did not end that world within {_LEAVE_S:.0f} s: {message}"
            raise CannotGoOnError(f"rank {session.rank} lost its world", why=why)
        time.sleep(_LOOK_EVERY_S)


def begin_heartbeat(plan: Plan, session: Session) -> Heartbeat:
    heartbeat = Heartbeat(RunDir(plan.run_dir).attempt(session.env.attempt), session.rank)
    session.report_collectives_to(heartbeat.collective)
    return heartbeat


def _asked_to_leave(line: LauncherLink, attempt: int, strategy: Strategy) -> bool:
    """A run that could not continue in another world does not leave this one to add a node."""
    return line.regroups and line.asked_to_leave(attempt) and (line.replaces or strategy.held_state() is not None)


def _settle(session: Session, line: LauncherLink | None) -> None:
    """Report the end of training of every rank before any of them can die in the script's own code: the launcher would
    wait for the others in a next world."""
    if line is not None:
        line.tell(Joined(False, is_done=True))
        session.barrier("leaving the run")


def _write_down(failed: Exception, path: Path) -> None:
    """The error with which a rank lost its world, in a file for debugging; it is not shown."""
    if not isinstance(failed, LeftWorld):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(failed)), encoding="utf-8")


def _teller(line: LauncherLink | None, host: ProcessOwner, session: Session) -> Callable[[int, str], None]:
    if line is None:
        return host.resumed
    attempt, is_furthest = session.env.attempt, session.gate is not None and session.begins_alike
    return lambda step, source: line.tell(Resumed(attempt, step, source, is_furthest))


class Watchers:
    """Rank 0's observers, which live as long as its process: a world that breaks is part of one and the same run."""

    def __init__(self, shows_progress: bool) -> None:
        self._shows_progress = shows_progress
        self._observer: Observers | None = None
        self._ticker: Ticker | None = None

    def observer(self, plan: Plan, session: Session) -> Observers | None:
        if not session.is_main:
            return None
        if self._observer is None:
            self._observer = Observers(observers_for(plan))
            if self._shows_progress:
                self._ticker = Ticker(RunScreen(plan.run_dir, session.env.attempt))
        return self._observer

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()
        if self._ticker is not None:
            self._ticker.close()


def line_for(plan: Plan, *, is_first: bool = True) -> LauncherLink | None:
    """The link to the launcher, to which it is reported whether this rank can continue in another world.

    In a second `fit` it cannot: a replacement runs the script from its beginning, and would join the first `fit`.
    """
    line = launcher_line()
    if line is not None:
        is_alone = is_first and not dist.is_initialized()
        is_plain = plan.precision.kind != "fp16" and plan.speed.parameters == "fp32"  # see `OneRankStep._gate_steps`
        env = worker_env()
        can_be_gated = is_plain and line.closes_gates and (env is None or env.num_nodes == 1)
        can_be_cut = plan.collectives == "gloo" or (plan.collectives == "nccl" and can_be_gated)
        can_regroup = can_be_cut and plan.is_held_by_each and CAN_SHUT_DOWN
        regroups = can_regroup and is_alone and "regroup" in ENGINES.entries[plan.strategy].can
        has_gate = regroups and plan.collectives == "nccl"
        line.tell(Joined(regroups, plan.legal_sizes, in_run=True, has_gate=has_gate))
    return line


def _evaluate(job: EvaluationJob, env: WorkerEnv) -> None:
    """A rank that trains nothing: it is started again with the others where one of them is lost."""
    line = launcher_line()
    if line is not None:
        line.tell(Joined(False, job.plan.legal_sizes, in_run=True))
    session = open_session(job.plan, env, line)
    heartbeat = begin_heartbeat(job.plan, session)
    try:
        plan = job.plan.for_world(session.world_size, session.env.num_nodes)
        with heartbeat.phase(Phase.EVALUATING):
            found = run_evaluation(replace(job, plan=plan), session)
        if session.is_main:
            write_private(RunDir(plan.run_dir).evaluation, json.dumps(found) + "\n")
        _settle(session, line)
    finally:
        heartbeat.close()
    leave_world()


def main() -> None:
    """The program `-m distributed.worker <run_dir>`: a rank that `Trainer.fit` started."""
    run_dir = Path(sys.argv[1])
    ticket = Ticket.from_text(ticket_in_env())
    sys.path[:] = ticket.sys_path
    env = worker_env()
    assert env is not None, "the worker is started by a launcher"
    job = load_job(run_dir, ticket.payload)
    job.settings.apply()
    if isinstance(job, EvaluationJob):
        _evaluate(job, env)
        return
    line = line_for(job.plan)
    session = open_session(job.plan, env, line)
    job = replace(job, plan=job.plan.for_world(session.world_size, session.env.num_nodes))
    history = run_rank(job, session, shows_progress=False, line=line, gives_back=False)
    leave_world()
    if history.interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
