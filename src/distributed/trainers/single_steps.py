"""Single steps: `Trainer.train_step` in a loop of the user's own, which brings a batch to every rank."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import IterableDataset

from distributed.core.engines.engine import load_strategy
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import DataError, PlanError, Problem, TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.launch.preflight import new_run_dir
from distributed.observe.observers import check_extras
from distributed.runtime.rendezvous import open_session
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import tree_flatten
from distributed.strategies.data_parallel.auto.auto_compression import choosing_of
from distributed.strategies.joint_optimizer import JointOptimizer
from distributed.train.callbacks.callback import Callback
from distributed.train.callbacks.trained import TrainedParameters
from distributed.train.checks.anomalies import AnomalyWatch
from distributed.train.loop_parts.bucket_trial import bucket_trial
from distributed.train.stragglers.communication import CommunicationShare, share_of
from distributed.train.stragglers.pace import Pace
from distributed.train.task import Task
from distributed.trainers.fitting import FitRequest, join_world


class UnknownData(IterableDataset[Any]):
    """The data of a loop of the user's own: nothing is known of it before its batches come."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError("the loop brings its own batches")


def samples_in(batch: Any) -> int:
    """
    >>> samples_in([torch.zeros(8, 3), torch.zeros(8)])
    8
    """
    is_flat = type(batch) in (list, tuple) and all(map(torch.is_tensor, batch))  # the usual case
    leaves = batch if is_flat else tree_flatten(batch)[0]
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise DataError(
            f"a batch of train_step has tensors of {sorted(sizes) or 'no'} rows",
            why="the rows are the samples, by which the ranks' gradients are weighted",
            do="pass tensors with one row a sample: trainer.train_step(data, target)",
        )
    return sizes.pop()


class SingleSteps:
    """The steps of one model on this rank. All ranks take as many, each with a batch of its own."""

    def __init__(self, request: FitRequest, callbacks: Sequence[Callback]) -> None:
        """`callbacks`: what the trainer has of them, which no single step would call."""
        with ExitStack() as held:
            self._session, plan = _join(request, held)
            _refuse_unused(plan, request.task, callbacks)
            strategy = load_strategy(plan.strategy)(plan)
            job = request.job(plan)
            strategy.check(job.task)
            self._session.take_place(plan.mesh)
            self._session.seed(plan.seed)
            held.callback(strategy.close)
            strategy.setup(job.task, self._session)
            _refuse_schedulers(strategy.optimizer, job.task)
            strategy.train(True)
            self._train_step = (
                AnomalyWatch(plan).around(strategy, strategy.train_step) if plan.detect_anomaly else strategy.train_step
            )
            self.communication: CommunicationShare | None = None  # of the last step that was measured
            self._buckets, self._steps = bucket_trial(plan, strategy, self._session, tell=self._say), 0
            if choosing := choosing_of(strategy):
                choosing.tell_by(self._say)
            self._strategy, self._trained, self._cap_mb = strategy, None, plan.replicate.bucket_cap_mb
            if not (job.task.has_phases or job.task.is_manual):  # which say themselves what they train
                self._trained = TrainedParameters(job.task.model)
            self._ranks, self._held = plan.mesh.data_ranks, held.pop_all()
        atexit.register(self.close)

    def take(self, batch: Any, *, measure: bool = False) -> float:
        """One synchronized step; the mean loss over the batches of all ranks, weighted by their samples.

        `measure`: `communication` is that of this step afterwards.
        """
        session, size = self._session, samples_in(batch)
        trained = self._trained
        own = [float(size), float(trained is not None and trained.has_changed)]
        shared = session.sum("samples of a step", torch.tensor(own, device=session.device))
        total, changed = shared.tolist()
        if changed and trained is not None:  # the loop has frozen or unfrozen parameters
            trained.agree(session)
            self._strategy.parameters_changed()
        total /= session.world_size // self._ranks  # ranks that share a model have the same samples
        self._steps += 1
        if self._buckets is not None:
            self._buckets.step_begins(self._steps)
        output = self._train_step([Microbatch(batch, size * self._ranks / total, size)], measure=measure)
        if self._buckets is not None:
            self._buckets.step_ended(self._steps, int(total), is_measured=measure)
        if measure:
            pace = Pace(session.rank, session.world_size, self._strategy.clock)
            row = torch.tensor(pace.row(), dtype=torch.float64, device=session.device)
            self.communication = share_of(pace.read(session.sum("paces of a step", row).tolist()))
        loss = torch.as_tensor(output.loss, dtype=torch.float64, device=session.device)
        return float(session.sum("loss of a step", loss).item()) / session.world_size

    @property
    def bucket_cap_mb(self) -> float:
        """Of DDP's buckets, for the next step."""
        choice = getattr(self._strategy, "bucket_choice", None)
        return self._cap_mb if choice is None else float(choice.layout.cap_mb)

    def _say(self, message: str) -> None:
        if self._session.is_main:
            print(message, flush=True)

    def close(self) -> None:
        """Give the model back; without a collective."""
        atexit.unregister(self.close)
        self._held.close()


def _join(request: FitRequest, held: ExitStack) -> tuple[Session, Plan]:
    world = worker_env()
    if world is not None:
        joined = held.enter_context(join_world(request, world, is_watched=False))
        session, plan = joined.session, joined.plan
    else:
        plan = request.plan(request.config.run_dir or new_run_dir())
        check_extras(plan)
        if plan.world_size > 1:
            raise TaskError(
                f"train_step in one process, but num_gpus={plan.world_size}",
                why="every rank brings its own batch, so each runs this loop",
                do=f"distributed train --script SCRIPT --num-gpus {plan.world_size}, or trainer.fit(loader)",
            )
        session = open_session(plan, WorkerEnv(run_dir=plan.run_dir))
    if plan.mesh.pp > 1 or plan.is_bitwise:
        what = "reproducible='bitwise'" if plan.is_bitwise else f"pipeline_parallel={plan.mesh.pp}"
        why = "its steps are made of parts that fit cuts from its data"
        raise PlanError(f"train_step with {what}", why=why, do="use trainer.fit(loader)")
    return session, plan.without_capture()


def _refuse_unused(plan: Plan, task: Task, callbacks: Sequence[Callback]) -> None:
    """Raise where the trainer has what would change a run, and a single step does nothing for."""
    problems = []
    if callbacks:
        what = f"train_step, and the trainer has {', '.join(type(one).__name__ for one in callbacks)}"
        why = "callbacks follow the epochs, validations and checkpoints of a run, and a single step has none"
        problems.append(Problem(what, why=why, do="leave callbacks out, or use trainer.fit(loader)"))
    if not plan.schedule.is_constant:
        why = "the length of your loop, over which the rate would move, is not known"
        do = "leave lr_schedule and warmup_… out, and step a scheduler of your own in the loop"
        problems.append(Problem("train_step with a learning-rate schedule", why=why, do=do))
    if plan.replicate.synchronization.kind != "every_step":
        why = "at the end of your loop the ranks would differ: it does not say which step is the last"
        problems.append(
            Problem(
                f"train_step with synchronization={plan.replicate.synchronization.kind!r}",
                why=why,
                do="set synchronization='every_step', or use trainer.fit(loader)",
            )
        )
    if task.scheduler is not None:
        problems.append(_of_scheduler())
    if plan.batch.most_accumulated > 1:
        why = "each call is a whole step with the batch that it is given"
        do = "give train_step larger batches, or use distributed.start for a loop with accumulation"
        problems.append(Problem(f"train_step with {plan.batch.most_accumulated} micro-batches a step", why=why, do=do))
    if problems:
        raise TaskError(problems)


def _refuse_schedulers(optimizer: torch.optim.Optimizer, task: Task) -> None:
    """The same of schedulers that came with the optimizers."""
    setups = [*optimizer.setups.values()] if isinstance(optimizer, JointOptimizer) else [task.optimizer_setup]
    if any(setup is not None and setup.scheduler is not None for setup in setups):
        raise TaskError([_of_scheduler()])


def _of_scheduler() -> Problem:
    why = "a single step knows neither the epochs nor the length of your loop, so nothing would move the rate"
    do = "leave the scheduler out, and call scheduler.step() in the loop where the rate is to move"
    return Problem("train_step, and a scheduler is given", why=why, do=do)
