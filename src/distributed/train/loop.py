"""The loop: epochs of steps, read top to bottom. All that may steer a run is a visible line here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from distributed.checkpoint.save.publishing import Saved
from distributed.core.events import Observer, StepEnded
from distributed.core.history import History
from distributed.core.plan import Plan
from distributed.core.protocol.heartbeat import Phase
from distributed.core.protocol.process_owner import OwnProcess, ProcessOwner
from distributed.core.run_dir import RunDir
from distributed.data.checks.ledger import Ledger, complete_ledgers, rewind_ledgers
from distributed.data.loading.loader import EvalLoader, Microbatch
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.session import Session
from distributed.runtime.shutdown import StopRequest
from distributed.strategies.base import NonFiniteLoss, StepOutput, Strategy
from distributed.train.callbacks.calls import NOTHING, Callbacks
from distributed.train.capture.capture import StepCapture
from distributed.train.capture.compile_trial import TrainStep, steps_of
from distributed.train.checks.replicas import ReplicaCheck
from distributed.train.checks.samples import SampleCheck
from distributed.train.checks.user_state import UserState
from distributed.train.evaluation import Evaluator
from distributed.train.explanations import explain_nonfinite
from distributed.train.loaders import Loader
from distributed.train.meter import Meter, Reading
from distributed.train.metrics import MetricNames
from distributed.train.progress import Due, EpochSteps, record_epoch
from distributed.train.reports import Reports
from distributed.train.resume.facts import Facts
from distributed.train.resume.survivor_state import HandedOver, SurvivorState
from distributed.train.run_events import RunEvents, nothing_to_resume
from distributed.train.schedule import Schedule
from distributed.train.state import BEGINNING, RunState
from distributed.train.stragglers.links import Links
from distributed.train.stragglers.pace import Pace
from distributed.train.stragglers.stragglers import Stragglers

_QUICK_S = 1e-3  # steps on a GPU that are shorter than this
_LATER = 8  # are reported that many steps later, when the device has enough to do


class LeftWorld(Exception):
    """All ranks finished the same step and continue in another world."""


class Turn(NamedTuple):
    """What comes next in a run: a step, answered with its StepOutput, or an evaluation, with its metrics."""

    microbatches: Sequence[Microbatch] | None  # of the step; None: an evaluation
    measures: bool = False  # whether the step's numbers are read
    epoch: int = 0


Turns = Generator[Turn, Any, History]


class Loop:
    """One run of one rank. Every rank runs the same loop; only rank 0 has observers."""

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        schedule: Schedule,
        session: Session,
        *,
        train: Loader,
        evaluation: EvalLoader | None,
        metric_names: list[str],
        stop: StopRequest,
        heartbeat: Heartbeat,
        observer: Observer | None,
        utilization: Callable[[], float | None] = lambda: None,
        on_resumed: Callable[[int, str], None] = lambda step, source: None,
        host: ProcessOwner | None = None,
        user: UserState,
        facts: Facts,
        callbacks: Callbacks,
    ) -> None:
        self._plan, self._strategy, self._schedule, self._session = plan, strategy, schedule, session
        self._train, self._stop, self._heartbeat, self._utilization = train, stop, heartbeat, utilization
        self._events = RunEvents(plan, observer)
        self._tells_at = 0  # the step after which delayed events are reported
        self._notes: list[str] = []  # of what this run resumes from
        keeps_ledger = plan.checkpoint.ledger and plan.mesh.is_first_of_replica(session.rank)
        self._ledger = Ledger(RunDir(plan.run_dir).ledger, session.data_rank) if keeps_ledger else None
        self._due, self.callbacks, self._is_ended = Due(plan), callbacks, False
        self._on_resumed, self._reports = on_resumed, Reports(host or OwnProcess())
        self.has_begun = False  # whether the state is that of the run
        self._pace, self._stragglers = (
            Pace(session.rank, session.world_size, strategy.clock, Links.of(session)),
            Stragglers(),
        )
        checks_loss = plan.on_nan == "stop" and session.device.type != "cpu"
        names = MetricNames(["loss", *metric_names], session)
        owns = strategy.owns_metrics
        self._meter = Meter(session, names, checks_loss=checks_loss, pace=self._pace, owns_metrics=owns)
        self._replicas = ReplicaCheck(
            session,
            lambda: chain(strategy.replicated(), user.replicated()),
            is_on=plan.replicate.check != "nothing",
            shares_random=plan.mesh.tp * plan.mesh.cp > 1,
        )
        self._samples = SampleCheck(plan, session, train)
        self._evaluator = Evaluator(
            strategy,
            session,
            loader=evaluation,
            names=names,
            stop=stop,
            heartbeat=heartbeat,
            samples=self._samples,
            events=self._events,
        )
        self._state = RunState(
            plan,
            strategy,
            schedule,
            session,
            meter=self._meter,
            samples=train.samples_per_epoch,
            data=self._samples,
            on_saved=self._saved,
            on_failed=self._events.not_saved,
            on_taken=lambda: stop.request(signal.SIGTERM),
            user=user,
            facts=facts,
            callbacks=callbacks,
        )
        self._capture: StepCapture | None = None
        self._train_step = steps_of(
            strategy, session, then=self._begin_capture, steps_done=self._steps_done, tell=self._events.warn
        )

    def _begin_capture(self) -> TrainStep:
        """What takes the steps of a run, once it is known how the model runs."""
        plan, session, strategy = self._plan, self._session, self._strategy
        if plan.speed.capture == "off" or session.device.type != "cuda":
            return strategy.train_step
        self._capture = StepCapture(strategy, plan, session, self._events.warn, self._steps_done)  # type: ignore[arg-type]  # as planned
        return self._capture.train_step

    def begin(self, inherited: HandedOver | None = None) -> None:
        """Take what the ranks of an earlier world handed over, or a checkpoint, or nothing."""
        self._restore(inherited)
        self._announce()
        self.callbacks.begin(self._state.progress, has_state=self._state.source != BEGINNING)

    def run(self) -> History:
        """Take the turns of the run with the strategy's steps and our evaluation."""
        turns = self.turns()
        answer: StepOutput | dict[str, float] | None = None
        try:
            while True:
                turn = turns.send(answer)
                try:
                    if turn.microbatches is not None:
                        answer = self._train_step(turn.microbatches, measure=turn.measures)
                    else:
                        answer = self._evaluate(turn.epoch)
                except NonFiniteLoss as found:
                    turns.throw(found)
        except StopIteration as end:
            return end.value

    def turns(self) -> Turns:
        """Train until the epochs or steps are done, or a stop is requested; then save."""
        begun = time.perf_counter()
        state, callbacks = self._state, self.callbacks
        stopped, metrics = self._due.is_over(state.progress.step), {}
        while not stopped and state.progress.epoch < self._plan.epochs:
            epoch = state.progress.epoch
            callbacks.call("on_epoch_start")
            stopped, is_whole, seconds, samples = yield from self._epoch_turns(epoch)
            evaluated = {} if self._interrupted else (yield Turn(None, epoch=epoch))
            metrics = self._meter.epoch_metrics() | evaluated
            metrics |= callbacks.epoch_ended(metrics)
            stopped = callbacks.agree().stops or stopped or self._is_ended
            if is_whole:  # from here to the end of the epoch nothing waits for another rank
                self._schedule.epoch_ended(metrics)
                state.progress.begin_next_epoch()
                state.proven.mark(state.progress.step)  # with the rates of the next epoch
            self._close_epoch(epoch, seconds, samples, metrics)
            self._replicas.compare(state.progress.step, again=True)  # with what evaluation and the scheduler changed
            self._reports.measured(state.progress, metrics)
            if is_whole and self._due.save_after_epoch(state.progress):
                self._save(metrics)
        callbacks.call("on_fit_end")
        self._save(metrics, wait=True)
        self._events.resume_compared(state.conclude())
        self._session.barrier("the end")  # rank 0 holds the store through which the others learn of the last save
        history = self._finish(time.perf_counter() - begun)
        state.close()
        return history

    def close(self) -> None:
        """After success or failure: a save that is still in flight may never hear of the other ranks."""
        try:
            self._state.abandon()
        finally:
            if self._capture is not None:
                self._capture.close()
            if self._ledger is not None:
                self._ledger.close()

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of this rank in a whole epoch; of a stream, it is not known."""
        steps = self._train.steps_per_epoch
        if steps is None:
            raise TypeError("the length of a stream is not known")
        return steps * self._plan.batch.accumulation

    def end_early(self) -> None:
        """Let the turn that comes next be the run's last; every rank calls it between the same two turns."""
        self._is_ended = True

    def failed(self, error: Exception) -> None:
        """The run or its world has ended so; a callback may have to take something back before anything is held."""
        if self.has_begun and not isinstance(error, LeftWorld):
            self.callbacks.call("on_exception", error)

    def held(self) -> SurvivorState | None:
        """What this rank holds when its world has broken: the state at the last step boundary."""
        return self._state.held()

    def _epoch_turns(self, epoch: int) -> Generator[Turn, Any, tuple[bool, bool, float, int]]:
        """Steps until the epoch or the run is over: (whether the run is, whether the epoch is, seconds, samples)."""
        state, meter, ledger, callbacks = self._state, self._meter, self._ledger, self.callbacks
        progress, train, replicas, proven = state.progress, self._train, self._replicas, state.proven
        follows_steps = callbacks.follows_steps
        check_step = self._samples.step_ended
        schedule, heartbeat, stop, due = self._schedule, self._heartbeat, self._stop, self._due
        seed_step, seed, check_world = self._session.seed_step, self._plan.seed, self._session.check
        within = EpochSteps.of(
            progress,
            self._plan.batch.global_batch,
            samples_per_epoch=train.samples_per_epoch,
            steps_per_epoch=train.steps_per_epoch,
        )
        first_step, before_epoch, last_step = within.first, within.before, within.last
        before = progress.samples_in_epoch
        self._events.epoch_started(epoch, progress.step)
        self._strategy.train(True)
        if self._capture is not None:
            self._capture.begin_epoch()
        meter.begin_epoch(goes_on=first_step > 0)
        begun = time.perf_counter()
        step, stopped, is_cut = progress.step, False, False
        heartbeat.epoch_begins()
        if note := self._samples.epoch_begins(epoch, first_step):  # all ranks have the same order
            self._events.warn(note)
        seed_step(seed, step)
        try:
            for microbatches, samples in self._pace.timed(train.epoch(epoch, first_step)):
                check_world()  # no more work for a device whose collectives were aborted
                step += 1
                saves = due.save_in_epoch(step, last_step)
                looks = due.look(step, last_step, saves=saves)
                output = yield Turn(microbatches, looks, epoch)
                if output is None:  # a loop of the user's own ends the epoch here
                    step, is_cut = step - 1, True
                    break
                if step == self._tells_at:
                    self._events.catch_up()
                schedule.step_ended(step)
                meter.add(output, samples)
                progress.end_step(step, within, samples)
                if follows_steps:  # before anything at which a world can break
                    callbacks.call("on_step_end")
                heartbeat.beat(step)
                check_step(step - before_epoch, looks=looks)  # of a stream: all ranks have read the same
                if ledger is not None:
                    ledger.record(step, epoch, train.indices)
                if replicas.is_due(step):
                    replicas.compare(step)
                if state.is_watched(step):
                    self._events.resume_compared(state.witness(output.loss, train.indices))
                asked = NOTHING
                if looks:
                    self._log(epoch, meter.read())
                    proven.mark(step)
                    replicas.settle()
                    asked = callbacks.agree()
                if saves or asked.saves or (looks and step != last_step and due.minutes_are_over(self._first_decides)):
                    self._save()
                if looks:
                    stop.hear()
                if stop.due(step):
                    if stop.is_leaving:
                        raise LeftWorld
                    stopped = True
                    break
                if asked.stops or due.is_over(step):
                    stopped = True
                    break
                seed_step(seed, step)
        except NonFiniteLoss as found:
            step -= found.steps_ago
            ranks = found.ranks or (self._session.rank,)
            shares = dict.fromkeys(self._plan.mesh.data_rank(rank) for rank in ranks)
            indices = [n for share in shares for n in train.sample_indices(epoch, step - before_epoch - 1, rank=share)]
            raise explain_nonfinite(found, ranks, epoch, step, indices) from None
        finally:
            self._events.catch_up()
        if not meter.is_empty:
            self._log(epoch, meter.read())
            proven.mark(step)
        self._samples.epoch_ended(step - before_epoch)  # all ranks together have taken every sample once
        seconds, trained = time.perf_counter() - begun, progress.samples_in_epoch - before
        return stopped, is_cut or not stopped or step == last_step, seconds, trained

    def _evaluate(self, epoch: int) -> dict[str, float]:
        if not self._evaluator.has_data:
            return {}
        self.callbacks.call("on_validation_start")
        metrics = self._evaluator.evaluate(epoch, self._state.progress.step)
        self.callbacks.call("on_validation_end", metrics)
        return metrics

    def _save(self, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        self.callbacks.call("on_save")
        self._replicas.compare(self._state.progress.step)
        self._replicas.settle()  # what ranks that differ hold is not saved
        if self._capture is not None:
            self._capture.prove()  # what is saved was not taken by a graph that has gone stale
        known = self._state.epochs[-1].metrics if wait and self._state.epochs else {}
        self._reports.saves(self._state.progress, metrics or known)
        with self._heartbeat.phase(Phase.SAVING):
            self._state.save(metrics, wait=wait)
        self._reports.tell()

    def _first_decides(self, is_due: bool) -> bool:
        """Rank 0's clock decides for all, at the steps where they meet anyway."""
        own = torch.tensor([int(self._session.is_main and is_due)], device=self._session.device)
        return bool(self._session.max("time for a checkpoint", own).item())

    def _saved(self, saved: Saved) -> None:
        self._due.saved()
        self._reports.saved(saved.step, saved.path)
        self._events.saved(saved)

    def _restore(self, inherited: HandedOver | None) -> None:
        restored = self._state.restore(inherited)
        if self._ledger is not None and self._session.is_main:
            progress, folder = self._state.progress, RunDir(self._plan.run_dir).ledger
            rewind_ledgers(folder, progress.step)
            if inherited is not None and progress.steps_in_epoch:
                batch = self._plan.batch.for_ranks(inherited.tree["ranks"])
                used = partial(self._train.sample_indices, progress.epoch, progress.steps_in_epoch - 1, batch)
                complete_ledgers(folder, progress.step, progress.epoch, used, ranks=batch.ranks)
        self._session.barrier("restored")
        self._replicas.begin(self._state.progress.step)
        self._session.check()
        self._state.proven.mark(self._state.progress.step)
        self.has_begun = True
        if self._session.is_main:
            self._on_resumed(self._state.progress.step, self._state.source)
        if restored is None:
            self._notes += [nothing_to_resume(self._plan)] if inherited is None and self._plan.checkpoint.resume else []
            return
        if restored.report.is_clean:
            self._notes += str(restored.report).splitlines()
        else:
            for line in str(restored.report).splitlines():
                self._events.warn(line)
        if "imported" in restored.manifest.meta:
            came, lacking = ("and optimizer ", "") if "optimizer" in restored.shared else ("", "optimizer, ")
            message = f"weights {came}of another program: {lacking}schedule and position start from the beginning"
            self._events.warn(message)
        elif not self._state.is_alike(restored) and not self._plan.is_bitwise:
            message = "another number of ranks or another mesh saved this: random generators start from the seed"
            self._events.warn(message)
        for line in self._state.changes:
            self._events.warn(line)
        self._events.resume_compared(self._state.verdict)

    @property
    def _interrupted(self) -> bool:
        return self._stop.is_agreed

    def _steps_done(self) -> int:
        return self._state.progress.step

    def _announce(self) -> None:
        step = self._state.progress.step
        self._heartbeat.beat(step)
        notes = [*map(str, self._strategy.decisions), *self._notes]
        self._events.run_started(self._plan.world_size, step, self._train.steps_per_epoch, notes)

    def _log(self, epoch: int, reading: Reading) -> None:
        self._state.poll()
        if not self._events.is_heard:
            return
        metrics, step = dict(reading.metrics), self._state.progress.step
        is_quick = self._capture is not None and reading.step_s < _QUICK_S
        tell, self._tells_at = self._events.tell_later if is_quick else self._events.tell, step + _LATER
        tell(
            StepEnded(
                time=time.time(),
                step=step,
                epoch=epoch,
                loss=metrics.pop("loss"),
                learning_rate=float(self._strategy.optimizer.param_groups[0]["lr"]),
                samples_per_second=reading.samples_per_second,
                gradient_norm=reading.gradient_norm,
                device_utilization=self._utilization(),
                metrics=metrics,
            )
        )
        for slow in self._stragglers.look(reading.paces, step=step, step_s=reading.step_s, time=time.time()):
            tell(slow)

    def _close_epoch(self, epoch: int, seconds: float, samples: int, metrics: dict[str, float]) -> None:
        step = self._state.progress.step
        record = record_epoch(self._state.epochs, epoch, step, samples=samples, seconds=seconds, metrics=metrics)
        self._events.epoch_ended(record, step)

    def _finish(self, seconds: float) -> History:
        history = History(
            epochs=tuple(self._state.epochs),
            total_time=seconds,
            steps=self._state.progress.step,
            world_size=self._plan.world_size,
            run_dir=self._plan.run_dir,
            interrupted=self._interrupted,
            stop_signal=int(self._stop.received or 0),
            checkpoint=self._state.path,
        )
        self._events.run_ended(history)
        return history
