"""The loop: epochs of steps, read top to bottom. All that may steer a run is a visible line here."""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import partial
from typing import Any

from distributed.checkpoint.save.publishing import Saved
from distributed.core.history import History
from distributed.core.protocol.heartbeat import Phase
from distributed.core.run_dir import RunDir
from distributed.data.checks.ledger import complete_ledgers, rewind_ledgers
from distributed.data.shares import EpochSplit
from distributed.strategies.base import NonFiniteLoss, StepOutput
from distributed.train.checks.anomalies import explain_nonfinite
from distributed.train.loop_parts.parts import LoopParts
from distributed.train.loop_parts.turns import Turn, Turns
from distributed.train.meter import Reading
from distributed.train.progress import EpochSteps, record_epoch
from distributed.train.resume.checkpoint_folder import read_beside
from distributed.train.resume.survivor_state import HandedOver, SurvivorState
from distributed.train.run_events import nothing_to_resume
from distributed.train.state import BEGINNING

_LOOKED_AT = 2  # first steps of a run, after each of which it is looked at what hooks have changed


class LeftWorld(Exception):
    """All ranks finished the same step and continue in another world."""


class Loop(LoopParts):
    """One run of one rank. Every rank runs the same loop; only rank 0 has observers."""

    def begin(self, handed_over: HandedOver | None = None, resume: str | None = None) -> None:
        """Take what the ranks of an earlier world handed over, or a checkpoint, or nothing. `resume`: the path of one
        that the plan does not name."""
        self._restore(handed_over, resume)
        self._announce()
        if self._given is not None:
            self._given.begin()
        self.callbacks.begin(self._state.progress, has_state=self._state.source != BEGINNING)

    def run(self) -> History:
        """Take the turns of the run with the strategy's steps and our evaluation."""
        self._validation.sanity_check()
        turns = self.turns()
        answer: StepOutput | dict[str, float] | None = None
        try:
            while True:
                turn = turns.send(answer)
                try:
                    if turn.microbatches is not None:
                        answer = self._train_step(turn.microbatches, measure=turn.measures)
                    else:
                        answer = self._validation.evaluate(turn)
                except NonFiniteLoss as found:
                    turns.throw(found)
        except StopIteration as end:
            return end.value

    def turns(self) -> Turns:
        """Train until the epochs or steps are done, or a stop is requested; then save."""
        begun = time.perf_counter()
        state, callbacks, steering = self._state, self.callbacks, self._steering
        stopped, metrics = self._due.is_over(state.progress.step), {}
        stopped = steering.agree(saves=False).stops or steering.stopped is not None or stopped
        stopped = stopped or steering.time_is_over()
        while not stopped and state.progress.epoch < self._plan.epochs:
            epoch = state.progress.epoch
            if not state.progress.steps_in_epoch:  # else it was called before this run resumed
                callbacks.call_anew("on_epoch_start")
                if steering.agree(saves=False).stops:
                    break
            stopped, is_whole, seconds, samples = yield from self._epoch_turns(epoch)
            callbacks.epoch_ends(is_interrupted=self._interrupted)
            is_last = stopped and not self._interrupted
            evaluates = self._due.evaluate_after_epoch(state.progress, is_last=is_last)
            if evaluates and not self._interrupted:
                yield from self._validation.turn(epoch)
            if self._interrupted:  # what ends with the epoch waits for its evaluation
                stopped, is_whole = True, is_whole and not (evaluates and self._validation.has_data)
            metrics = self._meter.epoch_metrics() | self._validation.measured_in(epoch)
            if is_whole:
                metrics |= callbacks.epoch_ended(metrics)
                self._validation.check(metrics)
            asked = steering.agree(is_whole=is_whole)
            stopped = asked.stops or stopped or self._is_ended
            ends_here = asked.stops and is_whole and not evaluates
            if ends_here and self._due.evaluate_after_epoch(state.progress, is_last=True):
                yield from self._validation.turn(epoch)
                metrics |= self._validation.measured_in(epoch)
            if is_whole:  # from here to the end of the epoch nothing waits for another rank
                self._schedule.epoch_ended(metrics)
                state.progress.begin_next_epoch()
                state.proven.mark(state.progress.step)  # with the rates of the next epoch
            self._close_epoch(epoch, seconds, samples, metrics)
            self._replicas.compare(state.progress.step, again=True)  # with what evaluation and the scheduler changed
            self._reports.measured(state.progress, metrics)
            if asked.saves or (is_whole and self._due.save_after_epoch(state.progress)):
                self._save(metrics)
        if callbacks.call_anew("on_fit_end") and metrics:  # else nothing was trained since this step was saved
            state.forget_saved()  # its state may have changed
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
        """Micro-batches of this rank in all of this epoch; of a stream, it is not known."""
        samples = self._train.samples_per_epoch
        if samples is None:
            raise TypeError("the length of a stream is not known")
        return EpochSplit(samples, self._plan.batch.at(self._state.progress.epoch), 0).micro_batches

    def save_now(self) -> str:
        """Save the state between two turns, and wait until it is written; every rank calls it. Returns its path."""
        self._save(wait=True)
        return self._state.path

    @property
    def batches_done(self) -> int:
        """Micro-batches of this rank in this epoch."""
        progress, known = self._state.progress, self._train.samples_per_epoch
        batch = self._plan.batch.at(progress.epoch)
        samples = progress.steps_in_epoch * batch.global_batch
        return EpochSplit(samples if known is None else min(samples, known), batch, 0).micro_batches

    def follow_trained(self, *, meets: bool) -> None:
        """A loop of the user's own begins a step, and may have frozen or unfrozen parameters. `meets`: all ranks agree
        on it now; within an epoch none may differ."""
        if meets or self.callbacks.trains_others(meets=meets):
            self._steering.agree(saves=False)

    def end_early(self) -> None:
        """Let the turn that comes next be the run's last; every rank calls it between the same two turns."""
        self._is_ended = True

    def failed(self, error: Exception) -> None:
        """The run or its world has ended so; a callback may have to take something back before anything is held."""
        if self.has_begun and not isinstance(error, LeftWorld):
            self._is_sound = self.callbacks.failed(error)

    def held(self) -> SurvivorState | None:
        """What this rank holds when its world has broken: the state at the last step boundary."""
        return self._state.held() if self._is_sound else None

    def _epoch_turns(self, epoch: int) -> Generator[Turn, Any, tuple[bool, bool, float, int]]:
        """Steps until the epoch or the run is over: (whether the run is, whether the epoch is, seconds, samples)."""
        state, meter, ledger, callbacks = self._state, self._meter, self._ledger, self.callbacks
        progress, train, replicas, proven = state.progress, self._train, self._replicas, state.proven
        buckets, adds_meetings, follows_steps = self._buckets, callbacks.adds_meetings, self._follows_steps
        steering, steps, looks_until = self._steering, self._steps, -1 if self._given is None else _LOOKED_AT
        saves_within, evaluates_within = self._due.saves_within_epochs, self._due.evaluates_within_epochs
        is_stream, compares, stopped, is_cut = train.samples_per_epoch is None, replicas.is_on, False, False
        schedule, heartbeat, stop, due = self._schedule, self._heartbeat, self._stop, self._due
        session, seed, check_step = self._session, self._plan.seed, self._samples.step_ended
        within, begun, before, paused = self._begin_epoch(epoch), time.perf_counter(), progress.samples_in_epoch, 0.0
        step, first_step, before_epoch, last_step = progress.step, within.first, within.before, within.last
        if first_step and due.evaluate_in_epoch(step, within) and progress.evaluated_at != step:
            paused += yield from self._validation.turn(epoch, within_epoch=True)  # a world broke in it
        session.seed_step(seed, step)
        try:
            for microbatches, samples in self._pace.timed(train.epoch(epoch, first_step)):
                session.check()  # no more work for a device whose collectives were aborted
                step += 1
                saves = saves_within and due.save_in_epoch(step, last_step)
                evaluates = evaluates_within and due.evaluate_in_epoch(step, within)
                is_due = due.look(step, last_step, saves=saves or evaluates)
                looks = is_due or (adds_meetings and callbacks.meets_after(step))
                if buckets is not None:
                    buckets.step_begins(step)
                output = yield Turn(microbatches, looks, epoch)
                if output is None:  # a loop of the user's own ends the epoch here
                    step, is_cut = step - 1, True
                    break
                if step == steps.due_at:
                    self._events.catch_up()
                schedule.step_ended(step)
                meter.add(output, samples)
                progress.end_step(step, within, samples)
                if follows_steps:  # before anything at which a world can break
                    self._follow_step(step, samples, looks)
                heartbeat.beat(step)
                if is_stream:
                    check_step(step - before_epoch, looks=looks)  # all ranks have read the same
                if ledger is not None:
                    ledger.record(step, epoch, train.indices)
                if compares and replicas.is_due(step):
                    replicas.compare(step)
                if step <= looks_until and self._given is not None:
                    self._given.refuse_changed_tensors()
                if state.is_watched(step):
                    self._events.resume_compared(state.compare_step(output.loss, train.indices))
                if looks:  # all that saves, evaluates or ends the run comes with a look, but for a signal
                    self._log(epoch, steering.read())
                    proven.mark(step)
                    replicas.settle()
                    asked, measured = steering.agree(), dict[str, float]()
                    if evaluates or due.evaluation_minutes_are_over(steering.first_decides):
                        paused += yield from self._validation.turn(epoch, within_epoch=True)
                        measured = self._validation.measured_in(epoch, step)
                        saves = saves or (step != last_step and bool(measured) and due.save_after_evaluation(progress))
                        if self._interrupted:
                            stopped = True
                            break
                        asked = asked.joined(steering.agree())  # before a save: callbacks have seen the evaluation
                    if saves or asked.saves or (step != last_step and due.minutes_are_over(steering.first_decides)):
                        self._save(measured)
                    stop.hear()
                stopped = stop.due(step)
                if stopped and stop.is_leaving:
                    raise LeftWorld
                stopped = stopped or (looks and (asked.stops or due.is_over(step) or steering.time_is_over()))
                if stopped:
                    break
                session.seed_step(seed, step)
        except NonFiniteLoss as found:
            raise self._explained(found, epoch, step, before_epoch) from None
        finally:
            self._events.catch_up()
        if not meter.is_empty:
            self._log(epoch, steering.read())
            proven.mark(step)
        self._samples.epoch_ended(step - before_epoch)  # all ranks together have taken every sample once
        seconds, is_whole = time.perf_counter() - begun - paused, is_cut or not stopped or step == last_step
        return stopped, is_whole, seconds, progress.samples_in_epoch - before

    @property
    def _follows_steps(self) -> bool:
        return self.callbacks.follows_steps or self._buckets is not None

    def _follow_step(self, step: int, samples: int, looks: bool) -> None:
        """What looks at each step. All ranks choose how gradients are reduced before anything is saved."""
        if self.callbacks.follows_steps:
            self._steering.step_ended(meets=looks)
        if self._buckets is not None:
            self._buckets.step_ended(step, samples, is_measured=looks)

    def _begin_epoch(self, epoch: int) -> EpochSteps:
        """Make all parts ready for the steps of an epoch, or for the rest of one that is resumed."""
        progress, train = self._state.progress, self._train
        within = EpochSteps.of(
            progress,
            self._plan.batch.at(epoch).global_batch,
            samples_per_epoch=train.samples_per_epoch,
            steps_per_epoch=train.steps_in(epoch),
        )
        self.callbacks.control.last_step = within.last
        self._events.epoch_started(epoch, progress.step)
        self._strategy.train(True)
        if self._capture is not None:
            self._capture.begin_epoch(epoch)
        self._meter.begin_epoch(is_resumed=within.first > 0)
        self._heartbeat.epoch_begins()
        if note := self._samples.epoch_begins(epoch, within.first):  # all ranks have the same order
            self._events.warn(note)
        return within

    def _explained(self, found: NonFiniteLoss, epoch: int, step: int, before_epoch: int) -> Exception:
        """A loss that is not finite, with its ranks, its step and the samples of that step."""
        step -= found.steps_ago
        ranks = found.ranks or (self._session.rank,)
        shares = dict.fromkeys(self._plan.mesh.data_rank(rank) for rank in ranks)
        used = self._train.sample_indices
        indices = [n for share in shares for n in used(epoch, step - before_epoch - 1, rank=share)]
        return explain_nonfinite(found, ranks, epoch, step, indices)

    def _evaluated_within(self) -> None:
        """Steps of the epoch follow an evaluation, which may have changed what they hold."""
        if self._capture is not None:
            self._capture.look_between()
        self._replicas.compare(self._state.progress.step, again=True)

    def _retrain(self) -> None:
        """Callbacks have frozen or unfrozen parameters. Every rank comes here."""
        self._strategy.parameters_changed()
        if self._capture is not None:
            self._capture.look_between()

    def _look_at_callbacks(self) -> None:
        """Callbacks have run between two steps."""
        if self._capture is not None:
            self._capture.callbacks_ran()

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
        for measured in self._measured:
            measured.saved(self._state.progress.step)
        self._reports.tell()

    def _saved(self, saved: Saved) -> None:
        self._due.saved()
        self._reports.saved(saved.step, saved.path)
        self._events.saved(saved)

    def _restore(self, handed_over: HandedOver | None, resume: str | None) -> None:
        restored = self._state.restore(handed_over, resume)
        if self._ledger is not None and self._session.is_main:
            progress, folder = self._state.progress, RunDir(self._plan.run_dir).ledger
            rewind_ledgers(folder, progress.step)
            if handed_over is not None and progress.steps_in_epoch:
                batch = self._plan.batch.for_ranks(handed_over.tree["ranks"])
                used = partial(self._train.sample_indices, progress.epoch, progress.steps_in_epoch - 1, batch)
                complete_ledgers(folder, progress.step, progress.epoch, used, ranks=batch.ranks)
        if restored is not None:
            for measured in self._measured:
                measured.resumed(restored.step, partial(read_beside, restored.path, restored.step))
        self._session.barrier("restored")
        self._replicas.begin(self._state.progress.step)
        self._session.check()
        self._state.proven.mark(self._state.progress.step)
        self.has_begun = True
        if self._session.is_main:
            self._on_resumed(self._state.progress.step, self._state.source)
        if restored is not None:
            self._notes += self._events.restored(restored, self._state)
        elif handed_over is None and self._plan.checkpoint.resume:
            self._notes.append(nothing_to_resume(self._plan))

    @property
    def _interrupted(self) -> bool:
        return self._stop.is_agreed

    def _announce(self) -> None:
        step = self._state.progress.step
        self._heartbeat.beat(step)
        notes = [*map(str, self._strategy.decisions), *self._notes]
        train = self._train
        samples = train.samples_per_epoch
        self._events.run_started(self._plan.world_size, step, train.steps_per_epoch, notes, samples=samples)

    def _log(self, epoch: int, reading: Reading) -> None:
        self._state.poll()
        step, is_captured = self._state.progress.step, self._capture is not None
        self._steps.log(reading, epoch=epoch, step=step, is_captured=is_captured)

    def _close_epoch(self, epoch: int, seconds: float, samples: int, metrics: dict[str, float]) -> None:
        step = self._state.progress.step
        record = record_epoch(self._state.epochs, epoch, step, samples=samples, seconds=seconds, metrics=metrics)
        self._events.epoch_ended(record, step)

    def _finish(self, seconds: float) -> History:
        history = History(
            epochs=tuple(self._state.epochs),
            evaluations=tuple(self._state.evaluations),
            total_time=seconds,
            steps=self._state.progress.step,
            world_size=self._plan.world_size,
            run_dir=self._plan.run_dir,
            interrupted=self._interrupted,
            stop_signal=int(self._stop.received or 0),
            checkpoint=self._state.path,
            left_in_ranks=() if self._given is None else tuple(self._given.left()),
            stopped="" if self.callbacks.stopped is None else self.callbacks.stopped.text,
        )
        self._events.run_ended(history)
        return history
