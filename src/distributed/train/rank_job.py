"""RankJob: what one rank is to train, and the loop that is made of it once its strategy is set up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from distributed.core.events import Observer
from distributed.core.plan import Plan
from distributed.core.protocol.process_owner import ProcessOwner
from distributed.data.named_sources import NamedSources, role_of
from distributed.data.source import Source
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.process_settings import ProcessSettings
from distributed.runtime.session import Session
from distributed.runtime.shutdown import StopRequest
from distributed.strategies.base import Strategy
from distributed.train.callbacks.callback import Callback
from distributed.train.callbacks.calls import Callbacks, Control
from distributed.train.checks.given_objects import GivenObjects
from distributed.train.checks.samples import check_datasets
from distributed.train.loaders import open_evaluations, open_training
from distributed.train.loop import Loop
from distributed.train.resume.facts import describe
from distributed.train.schedule import make_schedule
from distributed.train.stragglers.delay import Reader
from distributed.train.task import Task


@dataclass(frozen=True)
class RankJob:
    """Plan, task and data of one rank."""

    plan: Plan
    task: Task
    train: Source
    evaluation: NamedSources
    callbacks: tuple[Callback, ...] = ()
    settings: ProcessSettings = field(default_factory=ProcessSettings.of_this_process)  # of the caller


@contextmanager
def open_loop(
    job: RankJob,
    session: Session,
    strategy: Strategy,
    *,
    heartbeat: Heartbeat,
    host: ProcessOwner,
    observer: Callable[[Plan], Observer | None],
    utilization: Callable[[], float | None],
    on_resumed: Callable[[int, str], None],
    on_paces: Reader = lambda paces, step, step_s: None,
    asked_to_leave: Callable[[], bool] = lambda: False,
    is_supervised: bool = False,
    given: GivenObjects | None = None,
) -> Iterator[Loop]:
    """The loop of a rank whose strategy is set up; until it is left, signals request a stop of the run.

    `given`: to see what is changed in objects that do not come back; None: all of them are the caller's own.
    """
    plan, task = job.plan, job.task
    evaluated = {role_of("val_loader", name): source for name, source in job.evaluation.items()}
    check_datasets(plan, session, {"train_loader": job.train} | evaluated)
    train, worker_count, decisions = open_training(job.train, plan, session, strategy.optimizer)
    evaluation, more = open_evaluations(
        job.evaluation, plan, session, worker_count, strategy.optimizer, lockstep=strategy.lockstep_eval
    )
    plan = plan.with_decisions(*decisions, *more)
    per_epoch = train.steps_per_epoch
    total = plan.total_steps(per_epoch, train.samples_per_epoch)
    schedule = make_schedule(
        task.scheduler,
        plan.schedule,
        strategy.optimizer,
        per_epoch,
        total,
        setup=task.optimizer_setup,
        sets=job.evaluation,
    )
    rank, world_size, store = session.rank, session.world_size, session.store
    stopping = StopRequest(
        rank,
        world_size,
        store,
        asked_to_leave,
        session.named,
        is_supervised=is_supervised,
        apart=plan.replicate.synchronization.apart,
    )
    with stopping as stop:
        host.on_stop(stop.request)
        yield Loop(
            plan,
            strategy,
            schedule,
            session,
            train=train,
            evaluation=evaluation,
            task=task,
            stop=stop,
            heartbeat=heartbeat,
            observer=observer(plan),
            utilization=utilization,
            on_resumed=on_resumed,
            on_paces=on_paces,
            host=host,
            facts=describe(
                task,
                job.train,
                strategy.optimizer,
                schedule,
                total,
                compares_data=plan.sample_check,
                callbacks=job.callbacks,
            ),
            given=given,
            callbacks=Callbacks(job.callbacks, Control(plan, strategy, session, task.model, train), session),
        )
