"""The root of one rank: a Job and this rank's place become a session, a strategy and a loop."""

from __future__ import annotations

import os
import socket
import sys
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed.core.control import Joined, Line, Lost, Resumed
from distributed.core.engines import ENGINES, load_strategy
from distributed.core.env import WorkerEnv, ticket_in_env, worker_env
from distributed.core.errors import CannotGoOnError
from distributed.core.failure import is_collateral
from distributed.core.history import History
from distributed.core.hosts import Host, host_of
from distributed.core.plan import Plan
from distributed.core.private_files import Sealed, check_code, open_sealed
from distributed.core.run_files import HISTORY
from distributed.core.ticket import Ticket
from distributed.data.source import Source
from distributed.observe.live import RunScreen, Ticker
from distributed.observe.observers import Observers, observers_for
from distributed.observe.utilization import UtilizationSampler
from distributed.runtime.agent_line import agent_line
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.horovod_world import Meeting, find_meeting, horovod_line
from distributed.runtime.session import CollectiveError, Session, abandon_world, leave_world
from distributed.runtime.shutdown import StopRequest, left_to_launcher
from distributed.runtime.sockets import CAN_SHUT_DOWN
from distributed.strategies.base import Strategy
from distributed.train.facts import describe
from distributed.train.handover import Held, hand_over, take_model
from distributed.train.loaders import open_evaluation, open_training
from distributed.train.loop import LeftWorld, Loop
from distributed.train.sample_check import check_datasets
from distributed.train.schedule import make_schedule
from distributed.train.task import Task
from distributed.train.user_state import UserState, take_over

PICKLE = "/data.pkl"  # of the archive that torch.save makes: what runs as code when it is loaded


@dataclass(frozen=True)
class Job:
    """All that a rank needs."""

    plan: Plan
    task: Task
    train: Source
    evaluation: Source | None


def open_session(plan: Plan, env: WorkerEnv, line: Line | None = None) -> Session:
    """Join the world. With a line to the launcher: or the one after it, should it break while the ranks meet."""
    while True:
        try:
            is_met = dist.is_initialized()
            meeting = Meeting(env) if is_met else find_meeting(env, plan.run_dir, plan.collective_timeout_s)
            env = meeting.env
            return _join(plan, env, line, meeting.listener)
        except Exception as failed:
            if line is None or not line.regroups or not is_collateral(failed):
                raise
            if not env.restarts and not line.is_cut_off(env.attempt):  # ranks that never met will not meet again
                raise
            env = next_world(line, env.attempt, str(failed))


def _join(plan: Plan, env: WorkerEnv, line: Line | None, listener: socket.socket | None) -> Session:
    """The launcher can end the wait for the others, and later any collective."""
    how: dict[str, Any] = {"device": plan.device, "collectives": plan.collectives, "listener": listener}
    how["shares_gpus"] = plan.shares_gpus
    if line is not None:
        how["opening"] = lambda cut_off: setattr(line, "cut_off", cut_off)
        how["is_over"] = lambda: line.is_cut_off(env.attempt)
    session = Session.open(env, timeout_s=plan.collective_timeout_s, **how)
    if line is not None:
        line.cut_off = session.cut_off
        if line.is_cut_off(env.attempt):  # it was told while the world was made
            session.cut_off()
    return session


def next_world(line: Line, attempt: int, message: str) -> WorkerEnv:
    """Leave the world that broke, and wait for the one that the launcher makes of those who are left or come."""
    line.cut_off()
    abandon_world()
    line.tell(Lost(attempt, message))
    env = line.next_world(attempt)
    if env is None:
        raise CollectiveError("the launcher of this rank is gone")
    return env


def run_rank(
    job: Job, session: Session, *, shows_progress: bool, line: Line | None = None, gives_back: bool = True
) -> History:
    """Train this rank's part; what it returns is the same on every rank.

    With a line to its launcher, a rank that loses a peer keeps what it holds and goes on in the next world. Where
    somebody here wants the model afterwards, `gives_back` has the ranks bring it together.
    """
    held: Held | None = None
    is_spent = False  # its model and optimizer are those of a run that is gone
    watchers = _Watchers(shows_progress)
    try:
        while True:
            outcome = _live(job, session, held, is_spent, watchers, line, gives_back)
            if isinstance(outcome, History):
                return outcome
            assert line is not None
            is_spent = outcome.held is None and (outcome.had_begun or is_spent)
            if is_spent and line.replaces:
                raise CannotGoOnError(f"rank {session.rank} lost its world", why=outcome.message)
            held = outcome.held
            with left_to_launcher():
                env = next_world(line, session.env.attempt, outcome.message)
                session = open_session(job.plan, env, line)
            job = replace(job, plan=job.plan.for_world(session.world_size, session.env.num_nodes))
    except Exception:  # the script may deal with it, and end well; not so where it ended itself in mid-run
        if line is not None:
            line.tell(Joined(False))
        raise
    finally:
        watchers.close()


@dataclass(frozen=True)
class Broken:
    """How a world ended for a rank that goes on."""

    held: Held | None
    had_begun: bool
    message: str


def _live(
    job: Job,
    session: Session,
    held: Held | None,
    is_spent: bool,
    watchers: _Watchers,
    line: Line | None,
    gives_back: bool,
) -> History | Broken:
    """One world of this rank, from joining it to the end of the run or of the world."""
    plan, task, env = job.plan, job.task, session.env
    strategy, host = load_strategy(plan.strategy, plan.is_bitwise)(), host_of(env)
    loop: Loop | None = None
    heartbeat: Heartbeat | None = None
    try:
        inherited = None
        if line is not None and line.regroups and env.restarts:
            inherited = hand_over(session, held)
            if inherited is None and is_spent:
                raise CannotGoOnError(f"rank {session.rank} lost its world", why="no rank that is left holds the run")
        if inherited is not None:
            held = Held(inherited.step, inherited.tree)
            take_model(task.model, inherited.tree["model"])  # what the strategy begins with is sent from rank 0
            take_over(task, inherited.tree)
        session.data_rank, session.stream = plan.mesh.data_rank(session.rank), plan.mesh.stream(session.rank)
        session.seed(plan.seed)
        strategy.setup(task, plan, session)
        heartbeat = Heartbeat(env.attempt_dir(plan.run_dir), session.rank)
        session.enter = heartbeat.collective
        check_datasets(plan, session, {"train_loader": job.train, "val_loader": job.evaluation})
        train, staff, told = open_training(job.train, plan, session, strategy.optimizer)
        evaluation, more = open_evaluation(
            job.evaluation, plan, session, staff, strategy.optimizer, in_step=strategy.in_step
        )
        plan = replace(plan, decisions=(*plan.decisions, *told, *more))
        per_epoch = train.steps_per_epoch
        total = plan.total_steps(per_epoch)
        schedule = make_schedule(task.scheduler, plan.schedule, strategy.optimizer, per_epoch, total)
        asked = (lambda: False) if line is None else (lambda: _asked_to_leave(line, env.attempt, strategy))
        with StopRequest(
            session.rank, session.world_size, session.store, asked, session.named, is_supervised=line is not None
        ) as stop:
            host.on_stop(stop.request)
            loop = Loop(
                plan,
                strategy,
                schedule,
                train,
                evaluation,
                task.metric_names,
                session,
                stop,
                heartbeat,
                watchers.observer(plan, session),
                UtilizationSampler(session.device.type, session.device.index or 0).percent,
                _teller(line, host, env.attempt),
                host,
                user=UserState(task, plan, session),
                facts=describe(task, job.train, strategy.optimizer, schedule, total, compares_data=plan.sample_check),
            )
            loop.begin(inherited)
            held = inherited = None  # a second copy of the state on every rank that was given it
            history = loop.run()
        host.close()
        _settle(session, line)
        if gives_back:
            strategy.finish()
        if session.is_main:
            history.save(Path(plan.run_dir) / HISTORY)
        return history
    except Exception as failed:
        if line is None or not line.regroups or not (isinstance(failed, LeftWorld) or is_collateral(failed)):
            raise
        _write_down(failed, Path(env.attempt_dir(plan.run_dir), f"lost-{session.rank}.txt"))
        had_begun = loop is not None and loop.has_begun
        return Broken(loop.held() if loop is not None and had_begun else held, had_begun, str(failed))
    finally:
        if loop is not None:
            loop.close()
        strategy.close()
        if heartbeat is not None:
            heartbeat.close()


def _asked_to_leave(line: Line, attempt: int, strategy: Strategy) -> bool:
    """A run that could not go on in another world does not leave the one that it has for a host more."""
    return line.asked_to_leave(attempt) and (line.replaces or strategy.held_state() is not None)


def _settle(session: Session, line: Line | None) -> None:
    """What the script does after this has no step to go back to. The launcher knows that of every rank before the first
    of them can die there: it would tell the others a world to which they do not come."""
    if line is not None:
        line.regroups = False
        line.tell(Joined(False, is_done=True))
        session.barrier("leaving the run")


def _write_down(failed: Exception, path: Path) -> None:
    """What a rank saw of the end of its world, for whoever wants to know; nobody is shown it."""
    if not isinstance(failed, LeftWorld):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(failed)), encoding="utf-8")


def _teller(line: Line | None, host: Host, attempt: int) -> Callable[[int, str], None]:
    if line is None:
        return host.resumed
    return lambda step, source: line.tell(Resumed(attempt, step, source))


class _Watchers:
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


def line_for(plan: Plan, *, is_first: bool = True) -> Line | None:
    """The line to the launcher, which is told whether this rank can go on in another world.

    In a second `fit` it cannot: whoever replaces a rank runs the script from its beginning, and would not come there.
    """
    line: Line | None = agent_line() or horovod_line()
    if line is not None:
        is_alone = is_first and not dist.is_initialized()
        can_regroup = plan.collectives == "gloo" and plan.is_replicated and CAN_SHUT_DOWN
        line.regroups = can_regroup and is_alone and "regroup" in ENGINES.entries[plan.strategy].can
        line.tell(Joined(line.regroups, plan.legal_sizes, in_run=True))
    return line


def load_job(run_dir: Path, sealed: Sealed) -> Job:
    """The job that the launcher wrote: a pickle, and refused unless it is that very file."""
    handle = open_sealed(run_dir, sealed)
    try:
        with os.fdopen(os.dup(handle), "rb") as file, zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith(PICKLE)]
            check_code(run_dir / sealed.name, b"".join(map(archive.read, names)), sealed)
        opened = f"/proc/self/fd/{handle}"  # the file that was checked, whatever has its name by now
        path = opened if os.path.exists(opened) else run_dir / sealed.name
        job: Job = torch.load(path, mmap=True, weights_only=False, map_location="cpu")
        return job
    except zipfile.BadZipFile:
        check_code(run_dir / sealed.name, b"", sealed)
        raise
    finally:
        os.close(handle)


def main() -> None:
    """`python -m distributed.launch.rank -m distributed.worker <run_dir>`: a rank that `Trainer.fit` started."""
    run_dir = Path(sys.argv[1])
    ticket = Ticket.from_text(ticket_in_env())
    sys.path[:] = ticket.sys_path
    env = worker_env()
    assert env is not None, "the worker is started by a launcher"
    job = load_job(run_dir, ticket.payload)
    line = line_for(job.plan)
    session = open_session(job.plan, env, line)
    job = replace(job, plan=job.plan.for_world(session.world_size, session.env.num_nodes))
    history = run_rank(job, session, shows_progress=False, line=line, gives_back=False)
    leave_world()
    if history.interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
