"""The loop: epochs of steps, read top to bottom. Whatever may steer a run is a visible line here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from distributed.checkpoint.publishing import Saved
from distributed.core.events import Observer, ResumeCompared, StepEnded
from distributed.core.heartbeat import Phase
from distributed.core.history import EpochRecord, History
from distributed.core.hosts import Host, NoHost
from distributed.core.plan import Plan
from distributed.data.ledger import Ledger, last_recorded, rewind_ledgers
from distributed.data.loader import EvalLoader
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.session import Session
from distributed.runtime.shutdown import StopRequest
from distributed.strategies.base import NonFiniteLoss, Strategy
from distributed.train.capture import StepCapture
from distributed.train.explanations import explain_nonfinite
from distributed.train.facts import Facts
from distributed.train.handover import Held, Inherited
from distributed.train.links import Links
from distributed.train.loaders import Loader
from distributed.train.meter import Meter, Reading
from distributed.train.metrics import MetricTotals
from distributed.train.pace import Pace
from distributed.train.replica_check import ReplicaCheck
from distributed.train.reports import Reports
from distributed.train.sample_check import SampleCheck
from distributed.train.schedule import Schedule
from distributed.train.state import RunState
from distributed.train.stragglers import Stragglers
from distributed.train.telling import Telling, nothing_to_resume
from distributed.train.user_state import UserState
from distributed.train.witness import Verdict


class LeftWorld(Exception):
    """All ranks finished the same step and go on in another world."""


class Loop:
    """One run of one rank. Every rank runs the same loop; only rank 0 has observers."""

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        schedule: Schedule,
        train: Loader,
        evaluation: EvalLoader | None,
        metric_names: list[str],
        session: Session,
        stop: StopRequest,
        heartbeat: Heartbeat,
        observer: Observer | None,
        utilization: Callable[[], float | None] = lambda: None,
        on_resumed: Callable[[int, str], None] = lambda step, source: None,
        host: Host | None = None,
        *,
        user: UserState,
        facts: Facts,
    ) -> None:
        self._plan, self._strategy, self._schedule, self._session = plan, strategy, schedule, session
        self._train, self._evaluation, self._metric_names = train, evaluation, metric_names
        self._stop, self._heartbeat, self._utilization = stop, heartbeat, utilization
        self._telling = Telling(plan, observer)
        self._notes: list[str] = []  # of what this run goes on from
        keeps_ledger = plan.checkpoint.ledger and plan.mesh.is_first_of_replica(session.rank)
        self._ledger = Ledger(_ledger_dir(plan), session.data_rank) if keeps_ledger else None
        self._last_save = time.monotonic()
        self._on_resumed, self._reports = on_resumed, Reports(host or NoHost())
        self.has_begun = False  # whether the state is that of the run
        self._pace, self._stragglers = (
            Pace(session.rank, session.world_size, strategy.clock, Links.of(session)),
            Stragglers(),
        )
        checks_loss = plan.on_nan == "stop" and session.device.type != "cpu"
        self._meter = Meter(session, metric_names, checks_loss=checks_loss, pace=self._pace, counts=strategy.counts)
        self._replicas = ReplicaCheck(
            session,
            lambda: chain(strategy.replicated(), user.replicated()),
            is_on=plan.replicate.check != "nothing",
            shares_random=plan.mesh.tp * plan.mesh.cp > 1,
        )
        self._samples = SampleCheck(plan, session, train)
        self._state = RunState(
            plan,
            strategy,
            schedule,
            session,
            self._meter,
            train.samples_per_epoch,
            self._samples,
            self._saved,
            self._telling.not_saved,
            user,
            facts,
            lambda: stop.request(signal.SIGTERM),
        )
        self._capture = None
        if plan.speed.capture != "off" and session.device.type == "cuda":
            self._capture = StepCapture(strategy, plan, session, self._telling.warn, self._steps_done)  # type: ignore[arg-type]  # as planned
        self._train_step = strategy.train_step if self._capture is None else self._capture.train_step

    def begin(self, inherited: Inherited | None = None) -> None:
        """Take what the ranks of an earlier world handed over, or a checkpoint, or nothing."""
        self._restore(inherited)
        self._announce()

    def run(self) -> History:
        """Train until the epochs or steps are done, or somebody asks to stop; then save."""
        begun = time.perf_counter()
        state = self._state
        stopped, metrics = self._is_over(), {}
        while not stopped and state.progress.epoch < self._plan.epochs:
            epoch = state.progress.epoch
            stopped, is_whole, seconds, samples = self._train_epoch(epoch)
            metrics = self._meter.epoch_metrics() | (self._evaluate(epoch) if not self._interrupted else {})
            if is_whole:  # from here to the end of the epoch nothing waits for another rank
                self._schedule.epoch_ended(metrics)
                state.progress.begin_next_epoch()
            self._close_epoch(epoch, seconds, samples, metrics)
            self._settle_replicas(anew=True)  # with what evaluation and the scheduler have changed since the last step
            self._reports.measured(state.progress, metrics)
            is_due = self._save_is_due("epochs", state.progress.epoch) or self._save_is_due(
                "steps", state.progress.step
            )
            if is_whole and is_due:
                self._save(metrics)
        self._save(metrics, wait=True)
        self._compare(state.conclude())
        self._session.barrier("the end")  # rank 0 holds the store through which the others learn of the last save
        history = self._finish(time.perf_counter() - begun)
        state.close()
        return history

    def close(self) -> None:
        """Whatever happened: a save that is still in flight may never hear of the others."""
        try:
            self._state.abandon()
        finally:
            if self._capture is not None:
                self._capture.close()
            if self._ledger is not None:
                self._ledger.close()

    def held(self) -> Held | None:
        """What this rank holds when its world has broken: the state at the last step boundary."""
        return self._state.held()

    def _train_epoch(self, epoch: int) -> tuple[bool, bool, float, int]:
        """Steps until the epoch or the run is over: (whether the run is, whether the epoch is, seconds, samples)."""
        state, meter, train_step, ledger = self._state, self._meter, self._train_step, self._ledger
        progress, train, replicas = state.progress, self._train, self._replicas
        check_step = self._samples.step_ended
        schedule, heartbeat, stop, log_every = self._schedule, self._heartbeat, self._stop, self._plan.observe.log_every
        seed_step, seed = self._session.seed_step, self._plan.seed
        first_step = progress.steps_in_epoch
        if train.samples_per_epoch is not None:  # samples count, so that another number of ranks can go on
            first_step = -(-progress.samples_in_epoch // self._plan.batch.global_batch)  # the last step may be short
        before_epoch = progress.step - first_step  # steps of the epochs before this one
        last_step = before_epoch + train.steps_per_epoch if train.steps_per_epoch else None
        end, before = self._plan.max_steps, progress.samples_in_epoch
        self._telling.epoch_started(epoch, progress.step)
        self._strategy.train(True)
        if self._capture is not None:
            self._capture.begin_epoch()
        meter.begin_epoch(goes_on=first_step > 0)
        begun = time.perf_counter()
        step, stopped = progress.step, False
        heartbeat.epoch_begins()
        if told := self._samples.epoch_begins(epoch, first_step):  # all ranks have the same order
            self._telling.warn(told)
        seed_step(seed, step)
        try:
            for microbatches, samples in self._pace.timed(train.epoch(epoch, first_step)):
                step += 1
                saves = step != last_step and self._save_is_due("steps", step)  # the last one is saved after evaluation
                looks = saves or step % log_every == 0 or step in (last_step, end)  # what is not finite is not saved
                output = train_step(microbatches, measure=looks)
                schedule.step_ended(step)
                meter.add(output, samples)
                progress.step, progress.steps_in_epoch = step, step - before_epoch
                progress.samples_in_epoch += samples
                heartbeat.beat(step)
                check_step(step - before_epoch, looks=looks)  # of a stream: all ranks have read the same
                if ledger is not None:
                    ledger.record(step, epoch, train.indices)
                if replicas.is_due(step):
                    replicas.compare(step)
                if state.is_watched(step):
                    self._compare(state.witness(output.loss, train.indices))
                if looks:
                    self._log(epoch, meter.read())
                    replicas.settle()
                if saves or (looks and step != last_step and self._minutes_are_over()):
                    self._save()
                if looks:
                    stop.hear()
                if stop.due(step):
                    if stop.is_leaving:
                        raise LeftWorld
                    stopped = True
                    break
                if step == end:
                    stopped = True
                    break
                seed_step(seed, step)
        except NonFiniteLoss as found:
            step -= found.steps_ago
            indices = train.sample_indices(epoch, step - before_epoch - 1)
            raise explain_nonfinite(found, self._session.rank, epoch, step, indices) from None
        if not meter.is_empty:
            self._log(epoch, meter.read())
        self._samples.epoch_ended(step - before_epoch)  # all ranks together have taken every sample once
        seconds, trained = time.perf_counter() - begun, progress.samples_in_epoch - before
        return stopped, not stopped or step == last_step, seconds, trained

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Every validation sample once, over all ranks; the sums meet in one collective."""
        if self._evaluation is None:
            return {}
        with self._heartbeat.phase(Phase.EVALUATING):
            return self._evaluate_all(epoch, self._evaluation)

    def _evaluate_all(self, epoch: int, evaluation: EvalLoader) -> dict[str, float]:
        begun = time.perf_counter()
        self._strategy.train(False)
        totals, was_cut = MetricTotals(), False
        for batch, size in evaluation:
            if self._stop.received is not None and not self._strategy.in_step:
                was_cut = True
                break
            totals.add(self._strategy.eval_step(batch, size))
        metrics = totals.mean("validation metrics", self._session, ["loss", *self._metric_names])
        cut = torch.tensor([int(was_cut)], device=self._session.device)
        self._strategy.train(True)
        if self._session.max("evaluation was cut short", cut).item():
            return {}
        self._samples.evaluated(evaluation)
        return self._telling.evaluated(epoch, self._state.progress.step, time.perf_counter() - begun, metrics)

    def _save(self, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        self._settle_replicas()  # what ranks that differ hold is not saved
        if self._capture is not None:
            self._capture.prove()  # what is saved was not taken by a graph that has gone stale
        known = self._state.epochs[-1].metrics if wait and self._state.epochs else {}
        self._reports.saves(self._state.progress, metrics or known)
        with self._heartbeat.phase(Phase.SAVING):
            self._state.save(metrics, wait=wait)
        self._reports.tell()

    def _settle_replicas(self, *, anew: bool = False) -> None:
        self._replicas.compare(self._state.progress.step, anew=anew)
        self._replicas.settle()

    def _save_is_due(self, unit: str, count: int) -> bool:
        every = self._plan.checkpoint.every
        return every is not None and self._plan.checkpoint.unit == unit and count % every == 0

    def _minutes_are_over(self) -> bool:
        """Rank 0's clock decides for all, at the steps where they meet anyway."""
        every = self._plan.checkpoint.every
        if every is None or self._plan.checkpoint.unit != "minutes":
            return False
        due = self._session.is_main and time.monotonic() - self._last_save >= 60 * every
        agreed = self._session.max("time for a checkpoint", torch.tensor([int(due)], device=self._session.device))
        return bool(agreed.item())

    def _saved(self, saved: Saved) -> None:
        self._last_save = time.monotonic()
        self._reports.saved(saved.step, saved.path)
        self._telling.saved(saved)

    def _restore(self, inherited: Inherited | None) -> None:
        restored = self._state.restore(inherited)
        if self._ledger is not None and self._session.is_main:
            rewind_ledgers(_ledger_dir(self._plan), self._state.progress.step)
            if inherited is not None:
                self._complete_ledgers(inherited)
        self._session.barrier("restored")
        self._replicas.begin(self._state.progress.step)
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
                self._telling.warn(line)
        if "imported" in restored.manifest.meta:
            came, anew = ("and optimizer ", "") if "optimizer" in restored.shared else ("", "optimizer, ")
            message = f"weights {came}of another program: {anew}schedule and position begin anew"
            self._telling.warn(message)
        elif not self._state.is_alike(restored) and not self._plan.is_bitwise:
            message = "other ranks or another mesh than before: random generators begin anew from the seed"
            self._telling.warn(message)
        for line in self._state.told:
            self._telling.warn(line)
        self._compare(self._state.verdict)

    def _complete_ledgers(self, inherited: Inherited) -> None:
        """The last step was finished by all ranks of the world before this one, also by one that died before it wrote
        that down: which samples it used is known without it."""
        progress, folder = self._state.progress, _ledger_dir(self._plan)
        batch = self._plan.batch.for_ranks(inherited.tree["ranks"])
        for rank in range(batch.ranks) if progress.steps_in_epoch else ():
            if last_recorded(folder, rank) < progress.step:
                indices = self._train.sample_indices(progress.epoch, progress.steps_in_epoch - 1, batch, rank)
                ledger = Ledger(folder, rank)
                ledger.record(progress.step, progress.epoch, indices)
                ledger.close()

    def _compare(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            found: dict[str, Any] = {"passed": verdict.passed, "steps": verdict.steps, "component": verdict.component}
            self._telling.tell(ResumeCompared(time=time.time(), text=str(verdict), **found))

    @property
    def _interrupted(self) -> bool:
        return self._stop.is_agreed

    def _steps_done(self) -> int:
        return self._state.progress.step

    def _is_over(self) -> bool:
        return self._plan.max_steps is not None and self._state.progress.step >= self._plan.max_steps

    def _announce(self) -> None:
        step = self._state.progress.step
        self._heartbeat.beat(step)
        notes = [*self._strategy.notes, *self._notes]
        self._telling.run_started(self._plan.world_size, step, self._train.steps_per_epoch, notes)

    def _log(self, epoch: int, reading: Reading) -> None:
        self._state.poll()
        if not self._telling.is_heard:
            return
        metrics, step = dict(reading.metrics), self._state.progress.step
        self._telling.tell(
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
            self._telling.tell(slow)

    def _close_epoch(self, epoch: int, seconds: float, samples: int, metrics: dict[str, float]) -> None:
        steps = self._state.progress.step - sum(record.steps for record in self._state.epochs)
        record = EpochRecord(epoch, steps, samples, seconds, metrics)
        self._state.epochs.append(record)
        self._telling.epoch_ended(record, self._state.progress.step)

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
        self._telling.run_ended(history)
        return history


def _ledger_dir(plan: Plan) -> Path:
    return Path(plan.run_dir) / "ledger"
