"""The loop of a Keras model: epochs of steps, read top to bottom. Every process runs it; the main one has observers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from distributed.checkpoint.save.publishing import Saved
from distributed.core.errors import NonFiniteLossError
from distributed.core.events import Observer, StepEnded
from distributed.core.history import History
from distributed.core.plan import Plan
from distributed.core.protocol.heartbeat import Phase
from distributed.core.protocol.process_owner import OwnProcess, ProcessOwner
from distributed.engines.tensorflow.input.data import KerasLoader, Micro
from distributed.engines.tensorflow.meter import KerasMeter
from distributed.engines.tensorflow.model.layers import finalize
from distributed.engines.tensorflow.model.rates import Rate
from distributed.engines.tensorflow.run_state import KerasRunState
from distributed.engines.tensorflow.step import Stepper, StepResult
from distributed.engines.tensorflow.world.strategy import KerasWorld
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.signals import StopSignals
from distributed.train.progress import Due, EpochSteps, record_epoch
from distributed.train.reports import Reports
from distributed.train.run_events import RunEvents, nothing_to_resume


class KerasLoop:
    """One run of one process, over all of its replicas."""

    def __init__(
        self,
        plan: Plan,
        model: Any,
        stepper: Stepper,
        world: KerasWorld,
        *,
        state: KerasRunState,
        train: KerasLoader,
        evaluation: Iterable[Micro] | None,
        rate: Rate,
        stop: StopSignals,
        heartbeat: Heartbeat,
        observer: Observer | None,
        utilization: Callable[[], float | None] = lambda: None,
        host: ProcessOwner | None = None,
    ) -> None:
        self._plan, self._model, self._stepper, self._world, self._state = plan, model, stepper, world, state
        self._train, self._evaluation, self._rate, self._stop = train, evaluation, rate, stop
        self._heartbeat, self._events, self._utilization = heartbeat, RunEvents(plan, observer), utilization
        self._meter = KerasMeter(model, world)
        self._due, self._reports = Due(plan), Reports(host or OwnProcess())
        self._before: StepResult | None = None  # the step before this one, whose numbers are there without waiting
        self.interrupted = False

    def begin(self) -> None:
        """Take what a checkpoint holds, or nothing."""
        self._state.restore(on_saved=self._saved, on_failed=self._events.not_saved)
        finalize(self._model)
        self._meter.load_state(self._state.progress.meter)
        self._rate.set(self._state.progress.step, is_own=self._plan.checkpoint.own_rates)
        self._announce()

    def run(self) -> History:
        """Train until the epochs or steps are done, or a stop is requested; then save."""
        begun = time.perf_counter()
        progress, metrics = self._state.progress, {}
        stopped = self._due.is_over(progress.step)
        while not stopped and progress.epoch < self._plan.epochs:
            epoch = progress.epoch
            stopped, is_whole, seconds, samples = self._train_epoch(epoch)
            self._stepper.settle()
            metrics = self._meter.epoch_metrics() | (self._evaluate(epoch) if not self.interrupted else {})
            if is_whole:
                progress.begin_next_epoch()
                self._meter.begin_epoch()
            self._close_epoch(epoch, seconds, samples, metrics)
            self._reports.measured(progress, metrics)
            if is_whole and self._due.save_after_epoch(progress):
                self._save(metrics)
        self._save(metrics, wait=True)
        return self._finish(time.perf_counter() - begun)

    def _train_epoch(self, epoch: int) -> tuple[bool, bool, float, int]:
        """Steps until the epoch or the run is over: (whether the run is, whether the epoch is, seconds, samples)."""
        progress, meter, train, due = self._state.progress, self._meter, self._train, self._due
        within = EpochSteps.of(
            progress,
            self._plan.batch.global_batch,
            samples_per_epoch=train.samples_per_epoch,
            steps_per_epoch=train.steps_per_epoch,
        )
        last, before = within.last, progress.samples_in_epoch
        self._events.epoch_started(epoch, progress.step)
        begun, step, stopped = time.perf_counter(), progress.step, False
        self._heartbeat.epoch_begins()
        for micros, samples in train.epoch(epoch, within.first):
            step += 1
            saves = due.save_in_epoch(step, last)
            looks = due.look(step, last, saves=saves)
            result = self._stepper.step(micros, is_asked=self._stop.received is not None)
            self._rate.set(step)
            meter.add(result, samples)
            progress.end_step(step, within, samples)
            self._heartbeat.beat(step)
            if looks:
                self._log(epoch, within.before)
            if saves or (looks and step != last and due.minutes_are_over(self._first_decides)):
                self._save()
            if self._is_asked_to_stop(result):
                self.interrupted = stopped = True
                break
            if due.is_over(step):
                stopped = True
                break
        if not meter.is_empty:
            self._log(epoch, within.before)
        seconds, trained = time.perf_counter() - begun, progress.samples_in_epoch - before
        return stopped, not stopped or step == last, seconds, trained

    def _is_asked_to_stop(self, result: StepResult) -> bool:
        """All processes agree, since each sends its request with its step; what came with the last one is read here,
        where it has long been there."""
        if self._world.processes == 1:
            return self._stop.received is not None
        before, self._before = self._before, result
        return before is not None and float(before.asked) > 0

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Every validation sample once, over all replicas."""
        if self._evaluation is None:
            return {}
        with self._heartbeat.phase(Phase.EVALUATING):
            begun = time.perf_counter()
            metrics = self._meter.evaluate(self._stepper.evaluate(micro) for micro in self._evaluation)
        return self._events.evaluated(epoch, self._state.progress.step, time.perf_counter() - begun, metrics)

    def _save(self, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        self._reports.saves(self._state.progress, metrics or {})
        with self._heartbeat.phase(Phase.SAVING):
            self._stepper.settle()
            self._state.save(self._meter.state(), metrics, wait=wait)
        self._due.saved()
        self._reports.tell()

    def _saved(self, saved: Saved) -> None:
        self._reports.saved(saved.step, saved.path)
        self._events.saved(saved)

    def _first_decides(self, is_due: bool) -> bool:
        """The first process's clock decides for all, at the steps where they meet anyway."""
        return bool(self._world.gather(is_due)[0])

    def _announce(self) -> None:
        step = self._state.progress.step
        self._heartbeat.beat(step)
        for path, why in self._state.skipped:
            self._events.warn(f"the checkpoint {path} is passed over: {why}")
        for line in self._state.changed:
            self._events.warn(line)
        is_new = self._plan.checkpoint.resume and not self._state.path
        notes = [nothing_to_resume(self._plan)] if is_new else []
        self._events.run_started(self._world.size, step, self._train.steps_per_epoch, notes)

    def _log(self, epoch: int, before_epoch: int) -> None:
        self._state.poll()
        reading = self._meter.read()
        step = self._state.progress.step
        if reading.bad is not None and self._plan.on_nan == "stop":
            ago, value = reading.bad
            indices = self._train.sample_indices(epoch, step - ago - before_epoch - 1)
            raise _explain_nonfinite(value, self._world.replicas, epoch, step - ago, indices)
        self._events.tell(
            StepEnded(
                time=time.time(),
                step=step,
                epoch=epoch,
                loss=reading.loss,
                learning_rate=self._rate.now,
                samples_per_second=reading.samples_per_second,
                gradient_norm=reading.gradient_norm,
                device_utilization=self._utilization(),
                metrics=reading.metrics,
            )
        )

    def _close_epoch(self, epoch: int, seconds: float, samples: int, metrics: dict[str, float]) -> None:
        progress = self._state.progress
        record = record_epoch(progress.epochs, epoch, progress.step, samples=samples, seconds=seconds, metrics=metrics)
        self._events.epoch_ended(record, progress.step)

    def _finish(self, seconds: float) -> History:
        progress = self._state.progress
        history = History(
            epochs=tuple(progress.epochs),
            total_time=seconds,
            steps=progress.step,
            world_size=self._world.size,
            run_dir=self._plan.run_dir,
            interrupted=self.interrupted,
            stop_signal=int(self._stop.received or 0),
            checkpoint=self._state.path,
        )
        self._events.run_ended(history)
        return history


def _explain_nonfinite(value: float, replicas: range, epoch: int, step: int, indices: list[int]) -> NonFiniteLossError:
    shown = ", ".join(str(index) for index in indices[:32]) + (" …" if len(indices) > 32 else "")
    where = f"this process had the samples [{shown}]" if indices else "the batch came from a stream"
    return NonFiniteLossError(
        f"the loss is {value} at step {step} (epoch {epoch})",
        why=f"{where}; usual causes: a bad sample, too high a learning rate, fp16 overflow",
        do="look at these samples, lower the learning rate, set gradient_clipping; or, to train on, on_nan=continue",
    )
