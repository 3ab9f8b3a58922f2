"""TrainingRun: what a loop of the user's own calls. The loop keeps its shape; the turns of the run are taken in it.

start ─> prepare ─> for epoch in epochs(): for batch in loader: backward, step ─> the end of the last epoch
"""

from __future__ import annotations

import atexit
import signal
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.errors import TaskError
from distributed.core.history import History
from distributed.data.loading.loader import Microbatch
from distributed.data.source import Source, read_source
from distributed.strategies.base import MetricSum, StepOutput
from distributed.train.callbacks.calls import Control
from distributed.train.loaders import open_evaluation
from distributed.train.loop import Turn
from distributed.train.metrics import MetricNames, MetricTotals, sum_logged
from distributed.train.step_results import logged_value
from distributed.train.task import Task, check_task
from distributed.trainers.fitting import FitRequest
from distributed.trainers.own_loop.batches import EvaluationBatches, TrainingBatches
from distributed.trainers.own_loop.opening import OpenRun, open_run
from distributed.trainers.own_loop.tracked import Stateful, Tracked


class TrainingRun:
    """One training. Every rank has its own, and makes the same calls in the same order.

    `rank`, `world_size` and `is_main` are known at once; `device`, `run_dir` and `plan` after `prepare`.
    """

    def __init__(self, config: DistributedConfig, world: WorkerEnv | None, run_dir: str) -> None:
        env = world or WorkerEnv()
        self.config, self._world, self._run_dir = config, world, run_dir
        self.rank, self.world_size, self.local_rank = env.rank, env.world_size, env.local_rank
        self.history: History | None = None  # after the last epoch
        self.metrics: dict[str, float] = {}  # the newest means over all ranks
        self._tracked = Tracked()
        self._open: OpenRun | None = None
        self._turn: Turn | None = None  # the one that is to be taken, or is
        self._has_begun = False
        self._micro: Microbatch | None = None  # of the batch that the loop is at
        self._is_last = False  # of its step
        self._has_loss = False  # whether its loss went backward
        self._output: StepOutput | None = None  # of the step, once it is taken
        self._size = 0  # samples of the batch, also of one that is evaluated
        self._logged = MetricTotals()
        self._evaluated = MetricTotals()

    # ---- before the loop

    def prepare(self, *objects: Any) -> Any:
        """Make a model, its optimizer and DataLoaders those of a rank; returns them, in their order.

        The first DataLoader is trained on; others are evaluated with. The model and the optimizer are the same objects,
        so that everything that holds them still does.
        """
        if self._open is not None:
            raise TaskError(
                "prepare was called twice",
                why="a run has one model, one optimizer and one plan, made of all that is prepared",
                do="run.prepare(model, optimizer, train_loader, val_loader)",
            )
        model, optimizer, loaders = _sort(objects)
        sources = [read_source(loader, f"loader {at}") for at, loader in enumerate(loaders)]
        task = Task(model, optimizer=optimizer)
        check_task(task)
        request = FitRequest(self.config, task, sources[0], None, (), (self._tracked,))
        self._open = opened = open_run(request, self._world, self._run_dir)
        atexit.register(self._end_with_the_process)
        self.rank, self.world_size = opened.session.rank, opened.session.world_size
        self._names = MetricNames((), opened.session)
        made: dict[int, Any] = {id(loader): self._evaluation(sources[at]) for at, loader in enumerate(loaders) if at}
        made[id(loaders[0])] = TrainingBatches(sources[0].dataset, self._batches, self._batches_per_epoch)
        prepared = tuple(made.get(id(found), found) for found in objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def track(self, **objects: Stateful) -> None:
        """Save more objects in checkpoints, by name, and give them back their state at a resume: before `epochs`."""
        if self._has_begun:
            raise TaskError(
                "track was called after the first epoch had begun",
                why="what a run resumes from was loaded before",
                do="call run.track before run.epochs()",
            )
        for name, found in objects.items():
            self._tracked.add(name, found)

    # ---- the loop

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs that are left, each for one pass over the training data; then the run ends."""
        while self._next_epoch():
            assert self._turn is not None
            yield self._turn.epoch

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None) -> None:
        """The backward pass of a loss that is a mean over the samples of the batch, or over `weight`.

        Give the weight where it is not their number: the count of tokens, for example. The gradient of a step is then
        that of the mean over all ranks.
        """
        opened, micro = self._in_batch("backward")
        if self._output is not None:
            raise TaskError(
                "run.backward after the batch's run.step",
                why="its gradients would be added to those of the next step",
                do="call run.backward before run.step",
            )
        given = None if weight is None else torch.as_tensor(weight, dtype=torch.float64, device=loss.device)
        opened.strategy.backward(micro, loss, given)
        self._has_loss = True

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Reduce the gradients over the ranks, clip them, step the optimizer and drop them; whether it did.

        Under gradient accumulation it does so with the last batch of a step, and nothing before.
        """
        opened, _ = self._in_batch("step")
        own = opened.strategy.optimizer
        if optimizer is not None and optimizer is not own:
            raise TaskError(
                f"run.step got a {type(optimizer).__name__} that was not prepared",
                why="its parameters are not known to this run",
                do="pass it to run.prepare(model, optimizer, …)",
            )
        if not self._has_loss or self._output is not None:
            before = "run.backward" if not self._has_loss else "the next batch"
            raise TaskError(
                f"run.step before {before}", why="a step has the gradients of its batches", do="call run.backward first"
            )
        if not self._is_last:
            return False
        assert self._turn is not None
        self._output = opened.strategy.close_step(measure=self._turn.measures)
        return True

    def log(self, weight: float | None = None, **values: Any) -> None:
        """Report numbers of this batch: averaged over ranks, by samples or by `weight`.

        In a pass over evaluation data they are averaged over all of it, and are in `run.metrics` after it.
        """
        logged = {name: logged_value(name, value, weight, of_own_loop=True) for name, value in values.items()}
        if self._micro is not None:
            assert self._turn is not None
            if self._turn.measures and self._micro.size:
                self._logged.add(sum_logged(logged, self._micro.size))
        else:
            self._evaluated.add(sum_logged(logged, self._size))

    def save(self) -> None:
        """Save a checkpoint after this step, or at the end of this epoch."""
        self._control.save()

    def stop(self, reason: str) -> None:
        """End the run after this step or epoch; one rank's asking is enough."""
        self._control.stop(reason)

    # ---- over the ranks

    def mean(self, value: torch.Tensor | float, weight: float = 1.0) -> float:
        """The mean of a number over all ranks, each of which calls it."""
        totals = MetricTotals()
        totals.add({"value": MetricSum(float(value) * weight if weight else 0.0, float(weight))})
        session = self._opened.session
        return totals.mean("the mean of a number", session, MetricNames(["value"], session)).get("value", float("nan"))

    def print(self, *words: Any) -> None:
        """Print on rank 0 alone."""
        if self.is_main:
            print(*words, flush=True)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return self._opened.session.device

    @property
    def run_dir(self) -> str:
        return self._opened.plan.run_dir

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._opened.strategy.optimizer

    # ---- the end

    def finish(self) -> History:
        """Save and end the run, where its loop was left before the last epoch; otherwise it has ended by itself."""
        if self.history is None:
            opened = self._opened
            opened.loop.end_early()
            while self.history is None:
                self._take_turn(None if self._turn is None or self._turn.microbatches is not None else {})
        return self.history

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None and self._open is not None:
            self.finish()
        else:
            self._abandon()

    # ---- turns

    @property
    def _opened(self) -> OpenRun:
        if self._open is None:
            raise TaskError(
                "the run has no model yet",
                why="its device, its ranks and its plan are made for what is prepared",
                do="call run.prepare(model, optimizer, train_loader) first",
            )
        return self._open

    @property
    def _control(self) -> Control:
        return self._opened.loop.callbacks.control

    def _in_batch(self, call: str) -> tuple[OpenRun, Microbatch]:
        opened = self._opened
        if self._micro is None:
            raise TaskError(
                f"run.{call} outside of a pass over the training data",
                why="a step belongs to the batch that the prepared DataLoader has yielded",
                do="for epoch in run.epochs(): for batch in loader: …",
            )
        return opened, self._micro

    def _next_epoch(self) -> bool:
        opened = self._opened
        if not self._has_begun:
            self._has_begun = True
            opened.begin()
            self._take_turn(None)
        elif self._turn is not None:
            if self._turn.microbatches is not None:  # the loop has left the epoch before its end
                self._take_turn(None)
            if self._turn is not None:
                self._take_turn(self._means())
        return self._turn is not None

    def _take_turn(self, answer: Any) -> None:
        opened = self._opened
        try:
            self._turn = opened.turns.send(answer)
        except StopIteration as end:
            self._turn = None
            self._ended(end.value)

    def _batches(self) -> Iterator[Any]:
        opened = self._opened
        if not self._has_begun:
            raise TaskError(
                "the training data was asked for outside of run.epochs()",
                why="a pass over it is an epoch of the run",
                do="for epoch in run.epochs(): for batch in loader: …",
            )
        opened.strategy.train(True)
        while self._turn is not None and (micros := self._turn.microbatches) is not None:
            opened.strategy.open_step(measure=self._turn.measures)
            self._output = None
            try:
                for at, micro in enumerate(micros):
                    self._is_last, self._has_loss = at == len(micros) - 1, False
                    with opened.strategy.scope(micro, is_last=self._is_last) as batch:
                        self._micro = micro
                        yield batch
                    self._check_taken()
            finally:
                self._micro = None
                opened.strategy.forget_scopes()
            assert self._output is not None
            self._take_turn(self._output._replace(metrics=self._take_logged()))

    def _check_taken(self) -> None:
        if self._has_loss and (self._output is not None or not self._is_last):
            return
        missing = "run.backward" if not self._has_loss else "run.step"
        raise TaskError(
            f"the loop asked for the next batch, and did not call {missing} for the last one",
            why="every rank takes part in every step",
            do=f"call {missing} for every batch; break ends the epoch",
        )

    def _take_logged(self) -> Mapping[str, MetricSum] | None:
        assert self._turn is not None
        if not self._turn.measures:
            return None
        found, self._logged = self._logged.sums, MetricTotals()
        return found

    def _evaluation(self, source: Source) -> EvaluationBatches:
        opened = self._opened
        strategy, plan, session = opened.strategy, opened.plan, opened.session
        loader = open_evaluation(
            source, plan, session, None, strategy.optimizer, lockstep=strategy.lockstep_eval
        ).loader
        assert loader is not None
        return EvaluationBatches(
            source.dataset, loader, move=strategy.moved, entered=self._enter_evaluated, ended=self._means
        )

    def _enter_evaluated(self, size: int) -> None:
        self._size = size

    def _means(self) -> dict[str, float]:
        """What was logged in evaluations, over all ranks."""
        found, self._evaluated = self._evaluated, MetricTotals()
        self.metrics |= found.mean("logged in an evaluation", self._opened.session, self._names)
        return dict(self.metrics)

    def _batches_per_epoch(self) -> int:
        return self._opened.loop.batches_per_epoch

    def _ended(self, history: History) -> None:
        self.history, opened = history, self._opened
        atexit.unregister(self._end_with_the_process)
        opened.end(history)
        if history.interrupted:
            is_followed = self._world is not None and self._world.is_followed
            if self._world is not None and not is_followed and history.stop_signal != signal.SIGINT:
                raise SystemExit(self.config.requeue_exit_code)  # for Slurm, which started this rank itself
            raise KeyboardInterrupt

    def _end_with_the_process(self) -> None:
        """No collective here: another rank may have failed, or be somewhere else."""
        if self._has_begun and self._micro is None:
            message = "the loop was left before its last epoch, and what it trained since the last checkpoint is lost"
            warnings.warn(f"{message}: call run.finish() after it", stacklevel=1)
        self._abandon()

    def _abandon(self) -> None:
        if self._open is not None and self.history is None:
            atexit.unregister(self._end_with_the_process)
            self._open.turns.close()
            self._open.close()


def _sort(objects: tuple[Any, ...]) -> tuple[nn.Module, torch.optim.Optimizer | None, list[Any]]:
    """The model, its optimizer and the loaders among what was given to `prepare`."""
    models = [found for found in objects if isinstance(found, nn.Module)]
    optimizers = [found for found in objects if isinstance(found, torch.optim.Optimizer)]
    loaders = [found for found in objects if isinstance(found, DataLoader | Dataset)]
    known = {id(found) for found in (*models, *optimizers, *loaders)}
    unknown = [found for found in objects if id(found) not in known]
    if unknown:
        raise TaskError(
            f"prepare got a {type(unknown[0]).__name__}",
            why="it prepares a model, its optimizer and DataLoaders",
            do="run.track(name=…) saves other objects in checkpoints",
        )
    for what, found in (("model", models), ("optimizer", optimizers)):
        if len(found) > 1:
            raise TaskError(
                f"prepare got {len(found)} {what}s",
                why=f"the steps of a run have one {what}",
                do="distributed.Task trains several with optimizers of their own: configure_optimizers",
            )
    if not models or not loaders:
        missing = "model" if not models else "DataLoader to train on"
        raise TaskError(
            f"prepare got no {missing}",
            why="a run is planned for its model and its data",
            do="run.prepare(model, optimizer, train_loader)",
        )
    return models[0], optimizers[0] if optimizers else None, loaders
