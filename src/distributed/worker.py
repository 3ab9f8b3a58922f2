"""The root of one rank: a Job and this rank's place become a session, a strategy and a loop."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from distributed.core.env import WorkerEnv, worker_env
from distributed.core.history import History
from distributed.core.plan import Plan
from distributed.core.registry import BITWISE_STRATEGIES, STRATEGIES
from distributed.data.leaf_loader import LeafLoader
from distributed.data.loader import EvalLoader, StreamLoader, TrainLoader
from distributed.data.source import Source
from distributed.observe.live import RunScreen, Ticker
from distributed.observe.observers import Observers, observers_for
from distributed.observe.utilization import UtilizationSampler
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.session import Session, leave_world
from distributed.runtime.shutdown import StopRequest
from distributed.train.loop import Loader, Loop
from distributed.train.schedule import make_schedule
from distributed.train.task import Task

PAYLOAD, PATHS, HISTORY = "payload.pt", "worker.json", "history.json"  # in the run directory


@dataclass(frozen=True)
class Job:
    """All that a rank needs."""

    plan: Plan
    task: Task
    train: Source
    evaluation: Source | None


def open_session(plan: Plan, env: WorkerEnv) -> Session:
    return Session.open(env, device=plan.device, collectives=plan.collectives, timeout_s=plan.collective_timeout_s)


def run_rank(job: Job, session: Session, *, shows_progress: bool) -> History:
    """Train this rank's part; what it returns is the same on every rank."""
    plan, task = job.plan, job.task
    session.seed(plan.seed)
    strategy = (BITWISE_STRATEGIES if plan.is_bitwise else STRATEGIES).load(plan.strategy)()
    strategy.setup(task, plan, session)
    train = _train_loader(job, session)
    per_epoch = train.steps_per_epoch
    schedule = make_schedule(task.scheduler, plan.schedule, strategy.optimizer, per_epoch, plan.total_steps(per_epoch))
    heartbeat = Heartbeat(session.env.attempt_dir(plan.run_dir), session.rank)
    observer = Observers(observers_for(plan)) if session.is_main else None
    ticker = Ticker(RunScreen(plan.run_dir, session.env.attempt)) if session.is_main and shows_progress else None
    try:
        with StopRequest(session.rank, session.world_size, session.store) as stop:
            loop = Loop(
                plan,
                strategy,
                schedule,
                train,
                _eval_loader(job, session),
                task.metric_names,
                session,
                stop,
                heartbeat,
                observer,
                UtilizationSampler(session.device.type, session.device.index or 0).percent,
            )
            history = loop.run()
        if session.is_main:
            history.save(Path(plan.run_dir) / HISTORY)
        return history
    finally:
        strategy.close()
        heartbeat.close()
        if observer is not None:
            observer.close()
        if ticker is not None:
            ticker.close()


def _train_loader(job: Job, session: Session) -> Loader:
    plan, pins = job.plan, session.device.type == "cuda"
    if not job.train.is_stream:
        loader = LeafLoader if plan.is_bitwise else TrainLoader
        return loader(job.train, plan.batch, session.rank, seed=plan.seed, pin_memory=pins)

    def agree(samples: int, microbatches: int) -> tuple[int, int]:
        total = session.sum("samples of a step", torch.tensor([samples], device=session.device))
        most = session.max("micro-batches of a step", torch.tensor([microbatches], device=session.device))
        return int(total.item()), int(most.item())

    return StreamLoader(
        job.train, plan.batch, session.rank, seed=plan.seed, split=plan.iterable_split, agree=agree, pin_memory=pins
    )


def _eval_loader(job: Job, session: Session) -> EvalLoader | None:
    if job.evaluation is None:
        return None
    size = job.evaluation.batch_size or job.plan.batch.per_device
    pins = session.device.type == "cuda"
    split = job.plan.iterable_split
    return EvalLoader(job.evaluation, size, session.rank, session.world_size, split=split, pin_memory=pins)


def main() -> None:
    """`python -m distributed.launch.rank -m distributed.worker <run_dir>`: a rank that `Trainer.fit` started."""
    run_dir = Path(sys.argv[1])
    sys.path[:] = json.loads((run_dir / PATHS).read_text())["sys_path"]
    env = worker_env()
    assert env is not None, "the worker is started by a launcher"
    # a pickle, but one that our own parent wrote for this run, readable by this user alone
    job: Job = torch.load(run_dir / PAYLOAD, mmap=True, weights_only=False, map_location="cpu")
    session = open_session(job.plan, env)
    history = run_rank(job, session, shows_progress=False)
    leave_world()
    if history.interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
