"""TrainingRun: what a loop of the user's own calls. The loop keeps its shape; the turns of the run are taken in it.

start ─> prepare ─> for epoch in epochs(): for batch in loader: backward, step ─> the end of the last epoch
"""

from __future__ import annotations

import atexit
import signal
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from enum import Enum, auto
from typing import Any

import torch

from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.history import History
from distributed.core.plan import Decision
from distributed.data.source import Source
from distributed.strategies.base import MetricSum, NonFiniteLoss
from distributed.train.callbacks.calls import Control
from distributed.train.checks.anomalies import AnomalyWatch
from distributed.train.given.step_results import logged_value
from distributed.train.given.tasks import check_task
from distributed.train.loaders import open_evaluation
from distributed.train.loop import Turn
from distributed.train.metrics import MetricNames, MetricTotals, sum_logged
from distributed.trainers.dev_run import without_checkpoint
from distributed.trainers.fitting import FitRequest
from distributed.trainers.own_loop import misuses
from distributed.trainers.own_loop.batches import EvaluationBatches, TrainingBatches
from distributed.trainers.own_loop.opening import OpenRun, open_run
from distributed.trainers.own_loop.prepared import is_loader, name_among, sorted_by_kind
from distributed.trainers.own_loop.step_in_progress import StepInProgress
from distributed.trainers.own_loop.tracked import Stateful, Tracked
from distributed.trainers.summary.asked import print_summary

_NOTHING = nullcontext()


class Pass(Enum):
    """That of an epoch over its training data."""

    NOT_BEGUN = auto()
    OPEN = auto()  # the loop holds its iterator
    LEFT = auto()  # before the end
    ENDED = auto()


class TrainingRun:
    """One training. Every rank has its own, and makes the same calls in the same order.

    `rank`, `world_size` and `is_main` are known at once; `device`, `run_dir` and `plan` after `prepare`.
    """

    notes: tuple[Decision, ...] = ()  # of the script; part of the plan

    def __init__(self, config: DistributedConfig, world: WorkerEnv | None, run_dir: str) -> None:
        env = world or WorkerEnv()
        self.config, self._world, self._run_dir = config, world, run_dir
        self.rank, self.world_size, self.local_rank = env.rank, env.world_size, env.local_rank
        self.history: History | None = None  # after the last epoch
        self.metrics, self._tracked = dict[str, float](), Tracked()  # the newest means over all ranks; what is saved
        self._open: OpenRun | None = None
        self._has_begun = False
        self._pass = Pass.NOT_BEGUN
        self._turn: Turn | None = None  # the one that is to be taken, or is
        self._step: StepInProgress | None = None  # of that turn; None: it is an evaluation
        self._size: int | None = None  # samples of the batch that is evaluated
        self._anomalies: AnomalyWatch | None = None
        self._optimizers: dict[int, str] = {}  # the names of several, by their ids
        self._evaluated = MetricTotals()

    # ---- before the loop

    def prepare(self, *objects: Any) -> Any:
        """Make models, their optimizers and DataLoaders those of a rank; returns them, in their order.

        The first DataLoader is trained on; others are evaluated with. Models and optimizers are the same objects, so
        that everything that holds them still does.
        """
        if self._open is not None:
            raise misuses.prepared_twice()
        given = sorted_by_kind(objects)
        task, sources = given.task(), given.sources(self.config)
        self._optimizers = {id(found): name for name, found in given.optimizers_by_name.items()}
        check_task(task)
        if self.config.model_summary and self.is_main:
            print_summary(task, self.config, sources[0])
        request = FitRequest(
            self.config, task, sources[0], {}, self.notes, (self._tracked,), evaluated=tuple(sources[1:])
        )
        self._open = opened = open_run(request, self._world, self._run_dir, has_several=bool(self._optimizers))
        atexit.register(self._end_with_the_process)
        self.rank, self.world_size = opened.session.rank, opened.session.world_size
        self._names = MetricNames((), opened.session)
        if opened.plan.detect_anomaly:
            self._anomalies = AnomalyWatch(opened.plan, is_by_hand=True)
        trained = TrainingBatches(sources[0].dataset, self._batches, lambda: opened.loop.batches_per_epoch)
        made = iter([trained, *map(self._evaluation, sources[1:])])
        prepared = tuple(next(made) if is_loader(found) else found for found in objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def track(self, **objects: Stateful) -> None:
        """Save more objects in checkpoints, by name, and give them back their state at a resume: before `epochs`."""
        if self._has_begun:
            raise misuses.tracked_late()
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
        that of the mean over all ranks. With several optimizers, each batch may have several passes and steps.
        """
        opened, step = self._in_batch("backward")
        if self._size is not None:
            raise misuses.backward_in_evaluation()
        given = None if weight is None else torch.as_tensor(weight, dtype=torch.float64, device=loss.device)
        try:
            with _NOTHING if self._anomalies is None else self._anomalies.explaining():
                step.backward(loss, given)
        except NonFiniteLoss as found:
            opened.turns.throw(found)  # raises, with the step and its samples

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Reduce the gradients over the ranks, clip them, step the optimizer and drop them; whether it did.

        Under gradient accumulation it does so with the last batch of a step, and nothing before. With several
        optimizers, it is for the one that is named, and drops the gradients of its parameters.
        """
        opened, step = self._in_batch("step")
        if self._optimizers:
            step.take_one(name_among(self._optimizers, optimizer))
            return True
        if optimizer is not None and optimizer is not opened.strategy.optimizer:
            raise misuses.unknown_optimizer(optimizer)
        return step.take()

    def log(self, weight: float | None = None, **values: Any) -> None:
        """Report numbers of this batch: averaged over ranks, by samples or by `weight`.

        In a pass over evaluation data they are averaged over all of it, and are in `run.metrics` after it. Outside of
        both, each rank counts as one sample, and they are among the metrics of the epoch.
        """
        logged = {name: logged_value(name, value, weight, of_own_loop=True) for name, value in values.items()}
        if self._size is None and (step := self._at) is not None:
            if step.measures and step.size:
                step.logged.add(sum_logged(logged, step.size))
        else:
            self._evaluated.add(sum_logged(logged, 1 if self._size is None else self._size))

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
            if not self._has_begun:
                raise misuses.finished_early()
            self._opened.loop.end_early()
            self._report_step()
            while self.history is None:
                self._take_turn(None if self._turn is None or self._step is not None else self._means())
        return self.history

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None and self._has_begun:
            self.finish()
        else:
            self._abandon()

    # ---- turns

    @property
    def _opened(self) -> OpenRun:
        if self._open is None:
            raise misuses.not_prepared()
        return self._open

    @property
    def _control(self) -> Control:
        return self._opened.loop.callbacks.control

    @property
    def _at(self) -> StepInProgress | None:
        """The step at a batch of which the loop is; None: it is between two, or outside of a pass."""
        step = self._step
        return None if step is None or step.batch is None else step

    def _in_batch(self, call: str) -> tuple[OpenRun, StepInProgress]:
        opened, step = self._opened, self._at
        if step is None:
            raise misuses.outside_of_pass(f"run.{call}")
        return opened, step

    def _next_epoch(self) -> bool:
        opened = self._opened
        if not self._has_begun:
            self._has_begun = True
            opened.begin()
            self._take_turn(None)
        else:
            self._leave_pass()
            if self._turn is not None:
                self._take_turn(self._means())
        return self._turn is not None

    def _leave_pass(self) -> None:
        """End the epoch, where the loop has left its pass before the end."""
        self._report_step()
        if self._step is not None:
            self._take_turn(None)
        if self._pass is not Pass.OPEN:  # else the next one is refused: the scope of its batch was not left
            self._pass = Pass.NOT_BEGUN

    def _report_step(self) -> None:
        """Answer the turn whose step was taken; also where the loop has left its pass after that."""
        output = None if self._step is None else self._step.answer()
        if output is not None:
            self._take_turn(output)

    def _take_turn(self, answer: Any) -> None:
        """Answer this turn, and let the next one begin."""
        opened, self._step = self._opened, None
        try:
            self._turn = turn = opened.turns.send(answer)
        except StopIteration as end:
            self._turn = None
            self._ended(end.value)
        else:
            if turn.microbatches is not None:
                self._step = StepInProgress(opened.strategy, turn, has_several=bool(self._optimizers))

    def _batches(self) -> Iterator[Any]:
        opened = self._opened
        if self._turn is None:
            raise misuses.outside_of_epochs()
        if self._pass in (Pass.OPEN, Pass.ENDED):
            raise misuses.second_pass()
        self._pass, begins = Pass.OPEN, True
        watched = nullcontext if self._anomalies is None else self._anomalies.watching
        try:
            opened.strategy.train(True)
            self._report_step()
            while self._step is not None:
                if not self._optimizers:
                    opened.loop.follow_trained(meets=begins)
                begins = False
                yield from self._step.batches(watched)
                self._report_step()
            self._pass = Pass.ENDED
        finally:
            if self._pass is Pass.OPEN:
                self._pass = Pass.LEFT

    def _evaluation(self, source: Source) -> EvaluationBatches:
        opened = self._opened
        strategy, plan, session = opened.strategy, opened.plan, opened.session
        lockstep = strategy.lockstep_eval
        loader = open_evaluation(source, plan, session, None, strategy.optimizer, lockstep=lockstep).loader
        return EvaluationBatches(
            source.dataset,
            () if loader is None else loader,
            move=strategy.moved,
            begun=self._begin_evaluation,
            entered=self._enter_evaluated,
            left=self._leave_evaluated,
            ended=self._means,
        )

    def _begin_evaluation(self) -> None:
        if self._size is not None:
            raise misuses.two_evaluations()

    def _enter_evaluated(self, size: int | None) -> None:
        self._size = size

    def _leave_evaluated(self) -> None:
        """Its means come with the end of the epoch: those of an earlier pass are not theirs."""
        for name in self._evaluated.sums:
            self.metrics.pop(name, None)

    def _means(self) -> dict[str, float]:
        """What was logged in evaluations, over all ranks."""
        found, self._evaluated = self._evaluated, MetricTotals()
        self.metrics |= found.mean("logged in an evaluation", self._opened.session, self._names)
        return dict(self.metrics)

    def _ended(self, history: History) -> None:
        self.history, opened = history, self._opened
        atexit.unregister(self._end_with_the_process)
        opened.end(history)
        if opened.plan.is_dev_run:
            self.history = without_checkpoint(history, is_main=self.is_main)
        if history.interrupted:
            is_followed = self._world is not None and self._world.is_followed
            if self._world is not None and not is_followed and history.stop_signal != signal.SIGINT:
                raise SystemExit(self.config.requeue_exit_code)  # for Slurm, which started this rank itself
            raise KeyboardInterrupt

    def _end_with_the_process(self) -> None:
        """No collective here: another rank may have failed, or be somewhere else."""
        if self._has_begun and self._at is None:
            message = "the loop was left before its last epoch, and what it trained since the last checkpoint is lost"
            warnings.warn(f"{message}: call run.finish() after it", stacklevel=1)
        self._abandon()

    def _abandon(self) -> None:
        if self._open is not None and self.history is None:
            atexit.unregister(self._end_with_the_process)
            self._open.turns.close()
            self._open.close()
