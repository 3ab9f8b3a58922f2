"""LoopParts: what a loop is made of, and how the parts hear of each other."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import chain

from distributed.checkpoint.save.publishing import Saved
from distributed.core.events import Observer
from distributed.core.plan import Plan
from distributed.core.protocol.process_owner import OwnProcess, ProcessOwner
from distributed.core.run_dir import RunDir
from distributed.data.checks.ledger import Ledger
from distributed.runtime.heartbeat import Heartbeat
from distributed.runtime.session import Session
from distributed.runtime.shutdown import StopRequest
from distributed.strategies.base import StepOutput, Strategy
from distributed.strategies.data_parallel.auto.auto_compression import choosing_of
from distributed.train.callbacks.calls import Callbacks
from distributed.train.capture.capture import StepCapture
from distributed.train.capture.compile_trial import TrainStep, steps_of
from distributed.train.checks.anomalies import AnomalyWatch
from distributed.train.checks.given_objects import GivenObjects
from distributed.train.checks.replicas import ReplicaCheck
from distributed.train.checks.samples import SampleCheck
from distributed.train.checks.user_state import UserState
from distributed.train.evaluation import Evaluator, Loaders
from distributed.train.loaders import Loader
from distributed.train.loop_parts.bucket_trial import bucket_trial
from distributed.train.loop_parts.steering import Steering
from distributed.train.loop_parts.step_reports import StepReports
from distributed.train.loop_parts.validation import Validation, names_of
from distributed.train.meter import Meter
from distributed.train.metrics import MetricNames
from distributed.train.progress import Due
from distributed.train.reports import Reports
from distributed.train.resume.facts import Facts
from distributed.train.run_events import RunEvents
from distributed.train.schedule import Schedule
from distributed.train.state import RunState
from distributed.train.stragglers.delay import Reader
from distributed.train.stragglers.links import Links
from distributed.train.stragglers.pace import Pace
from distributed.train.task import Task


class LoopParts:
    """Of one rank, each part made once. What they report to the loop are its methods below."""

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        schedule: Schedule,
        session: Session,
        *,
        train: Loader,
        evaluation: Loaders,
        task: Task,
        stop: StopRequest,
        heartbeat: Heartbeat,
        observer: Observer | None,
        utilization: Callable[[], float | None] = lambda: None,
        on_resumed: Callable[[int, str], None] = lambda step, source: None,
        on_paces: Reader = lambda paces, step, step_s: None,
        host: ProcessOwner | None = None,
        facts: Facts,
        callbacks: Callbacks,
        given: GivenObjects | None = None,
    ) -> None:
        self._given = given  # what does not come back from this rank, if it is rank 0 of ranks that fit started
        self._plan, self._strategy, self._schedule, self._session = plan, strategy, schedule, session
        self._train, self._stop, self._heartbeat = train, stop, heartbeat
        self._events = RunEvents(plan, observer)
        self._steps = StepReports(self._events, strategy, utilization=utilization, on_paces=on_paces)
        self._notes: list[str] = []  # of what this run resumes from
        keeps_ledger = plan.checkpoint.ledger and plan.mesh.is_first_of_replica(session.rank)
        self._ledger = Ledger(RunDir(plan.run_dir).ledger, session.data_rank) if keeps_ledger else None
        self._due, self.callbacks, self._is_ended = Due(plan), callbacks, False
        self._on_resumed, self._reports = on_resumed, Reports(host or OwnProcess())
        self.has_begun = False  # whether the state is that of the run
        self._is_sound = True  # whether what is held may be handed over
        self._pace = Pace(session.rank, session.world_size, strategy.clock, Links.of(session))
        names, user = MetricNames(["loss", *task.metric_names], session), UserState(task, plan, session)
        self._meter = self._make_meter(task, names)
        self._replicas = ReplicaCheck(
            session,
            lambda: chain(strategy.replicated(), user.replicated(), callbacks.replicated()),
            is_on=plan.replicate.check != "nothing",
            shares_random=plan.mesh.tp * plan.mesh.cp > 1,
        )
        self._samples = SampleCheck(plan, session, train)
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
        self._validation = self._make_validation(task, names, evaluation)
        self._steering = Steering(
            plan,
            session,
            callbacks,
            meter=self._meter,
            state=self._state,
            due=self._due,
            events=self._events,
            on_retrained=self._retrain,
            on_called=self._look_at_callbacks,
        )
        self._measure_steps()
        self._capture: StepCapture | None = None
        self._train_step: Callable[..., StepOutput] = steps_of(
            strategy, session, then=self._begin_capture, steps_done=self._steps_done, tell=self._events.warn
        )
        if plan.detect_anomaly:
            self._train_step = AnomalyWatch(plan).around(strategy, self._train_step)

    def _measure_steps(self) -> None:
        """What the times of the first steps decide."""
        tell, put = self._events.warn, self._state.folder.put_beside
        self._buckets = bucket_trial(self._plan, self._strategy, self._session, tell=tell, put=put)
        choosing = choosing_of(self._strategy)
        if choosing is not None:
            choosing.tell_by(tell, put)
        self._measured = [one for one in (self._buckets, choosing) if one is not None]

    def _make_meter(self, task: Task, names: MetricNames) -> Meter:
        plan, session = self._plan, self._session
        return Meter(
            session,
            names,
            checks_loss=plan.on_nan == "stop" and session.device.type != "cpu",
            pace=self._pace,
            owns_metrics=self._strategy.owns_metrics,
            sums_loss=lambda: task.sums_loss,
        )

    def _make_validation(self, task: Task, names: MetricNames, evaluation: Loaders) -> Validation:
        evaluator = Evaluator(
            self._strategy,
            self._session,
            loaders=evaluation,
            names=names,
            task=task,
            stop=self._stop,
            heartbeat=self._heartbeat,
            samples=self._samples,
            events=self._events,
        )
        return Validation(
            self._plan,
            evaluator,
            self._state,
            due=self._due,
            meter=self._meter,
            stop=self._stop,
            callbacks=self.callbacks,
            whole_set=names_of(task.whole_set, evaluation),
            on_returned=self._evaluated_within,
        )

    def _begin_capture(self) -> TrainStep:
        """What takes the steps of a run, once it is known how the model runs."""
        plan, session, strategy = self._plan, self._session, self._strategy
        if plan.speed.capture == "off" or session.device.type != "cuda":
            return strategy.train_step
        self._capture = StepCapture(strategy, plan, session, self._events.warn, self._steps_done)  # type: ignore[arg-type]  # as planned
        return self._capture.train_step

    def _steps_done(self) -> int:
        return self._state.progress.step

    def _saved(self, saved: Saved) -> None:
        """A checkpoint is written."""
        raise NotImplementedError

    def _evaluated_within(self) -> None:
        """Steps of an epoch follow an evaluation."""
        raise NotImplementedError

    def _retrain(self) -> None:
        """Callbacks have frozen or unfrozen parameters."""
        raise NotImplementedError

    def _look_at_callbacks(self) -> None:
        """Callbacks have run between two steps."""
        raise NotImplementedError
