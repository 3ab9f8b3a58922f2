"""Single steps: `Trainer.train_step` in a loop of the user's own, which brings a batch to every rank."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import IterableDataset

from distributed.core.engines.engine import load_strategy
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import DataError, PlanError, TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.launch.preflight import new_run_dir
from distributed.observe.observers import check_extras
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import tree_flatten
from distributed.trainers.fitting import FitRequest, join_world
from distributed.worker import open_session


class UnknownData(IterableDataset[Any]):
    """The data of a loop of the user's own: nothing is known of it before its batches come."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError("the loop brings its own batches")


def samples_in(batch: Any) -> int:
    """
    >>> samples_in([torch.zeros(8, 3), torch.zeros(8)])
    8
    """
    sizes = {len(leaf) for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise DataError(
            f"a batch of train_step has tensors of {sorted(sizes) or 'no'} rows",
            why="the rows are the samples, by which the ranks' gradients are weighted",
            do="pass tensors with one row a sample: trainer.train_step(data, target)",
        )
    return sizes.pop()


class SingleSteps:
    """The steps of one model on this rank. All ranks take as many, each with a batch of its own."""

    def __init__(self, request: FitRequest) -> None:
        with ExitStack() as held:
            self._session, plan = _join(request, held)
            strategy = load_strategy(plan.strategy)(plan)
            job = request.job(plan)
            strategy.check(job.task)
            self._session.take_place(plan.mesh)
            self._session.seed(plan.seed)
            held.callback(strategy.close)
            strategy.setup(job.task, self._session)
            strategy.train(True)
            self._strategy, self._ranks, self._held = strategy, plan.mesh.data_ranks, held.pop_all()
        atexit.register(self.close)

    def take(self, batch: Any) -> float:
        """One synchronized step; the mean loss over the batches of all ranks, weighted by their samples."""
        session, size = self._session, samples_in(batch)
        total = float(session.sum("samples of a step", torch.tensor(float(size), device=session.device)).item())
        total /= session.world_size // self._ranks  # ranks that share a model have the same samples
        output = self._strategy.train_step([Microbatch(batch, size * self._ranks / total, size)], measure=False)
        loss = torch.as_tensor(output.loss, dtype=torch.float64, device=session.device)
        return float(session.sum("loss of a step", loss).item()) / session.world_size

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
