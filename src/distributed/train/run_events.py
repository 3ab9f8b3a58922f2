"""The events that every loop reports, torch's and Keras'; without an observer, nothing is reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distributed.checkpoint.save.publishing import Saved
from distributed.core.errors import CheckpointError
from distributed.core.events import (
    CheckpointSaved,
    EpochEnded,
    EpochStarted,
    EvaluationEnded,
    Event,
    Observer,
    ResumeCompared,
    RunEnded,
    RunStarted,
    RunStopped,
    Warned,
)
from distributed.core.history import EpochRecord, History, validation_name
from distributed.core.plan import Decision, Plan
from distributed.core.secrets import mask
from distributed.train.progress import Progress

if TYPE_CHECKING:
    from distributed.checkpoint.restore.restoring import Restored
    from distributed.train.callbacks.calls import StopReason
    from distributed.train.resume.certificate import Verdict
    from distributed.train.state import RunState


class RunEvents:
    """Makes the events of one process; only the main one has an observer."""

    def __init__(self, plan: Plan, observer: Observer | None) -> None:
        self._plan, self._observer = plan, observer
        self._late: list[Event] = []  # in their order

    @property
    def is_heard(self) -> bool:
        return self._observer is not None

    def tell(self, event: Event) -> None:
        if self._late:
            self.catch_up()
        if self._observer is not None:
            self._observer.on(event)

    def tell_later(self, event: Event) -> None:
        """With the next one, or at `catch_up`: observers take as long as several steps of a small model."""
        self._late.append(event)

    def catch_up(self) -> None:
        late, self._late = self._late, []
        for event in late:
            self.tell(event)

    def warn(self, message: str) -> None:
        self.tell(Warned(time=time.time(), message=message))

    def run_started(
        self,
        world_size: int,
        first_step: int,
        steps_per_epoch: int | None,
        notes: Sequence[str] = (),
        *,
        samples: int | None = None,
    ) -> None:
        """`notes`: what came to be decided after the plan was made. `samples`: of an epoch."""
        plan = self._plan
        self.tell(
            RunStarted(
                time=time.time(),
                run_dir=plan.run_dir,
                world_size=world_size,
                device=plan.device,
                backend=plan.strategy,
                epochs=plan.epochs,
                steps_per_epoch=steps_per_epoch,
                total_steps=plan.total_steps(steps_per_epoch, samples),
                first_step=first_step,
                global_batch=plan.batch.global_batch,
                settings=mask(plan.settings),
                decisions=mask([*map(str, plan.decisions), *notes]),
            )
        )

    def epoch_started(self, epoch: int, step: int) -> None:
        self.tell(EpochStarted(time=time.time(), epoch=epoch, step=step))

    def evaluated(
        self, epoch: int, step: int, seconds: float, metrics: dict[str, float], *, within_epoch: bool = False
    ) -> dict[str, float]:
        """Returns them under the names that they have in a history."""
        self.tell(
            EvaluationEnded(
                time=time.time(), step=step, epoch=epoch, seconds=seconds, metrics=metrics, within_epoch=within_epoch
            )
        )
        return {validation_name(name): value for name, value in metrics.items()}

    def epoch_ended(self, record: EpochRecord, step: int) -> None:
        self.tell(
            EpochEnded(
                time=time.time(),
                epoch=record.epoch,
                step=step,
                seconds=record.seconds,
                samples=record.samples,
                samples_per_second=record.samples_per_second,
                metrics=record.metrics,
            )
        )

    def saved(self, saved: Saved) -> None:
        self.tell(
            CheckpointSaved(
                time=time.time(),
                step=saved.step,
                path=saved.path,
                seconds=saved.seconds,
                stall_seconds=saved.stall_s,
                written_bytes=saved.written_bytes,
                total_bytes=saved.total_bytes,
            )
        )
        if saved.warning:
            self.warn(saved.warning)

    def not_saved(self, failed: CheckpointError) -> None:
        problem = failed.problems[0]
        self.warn(f"{problem.what}: {problem.why}; training continues without this checkpoint")

    def restored(self, restored: Restored, state: RunState) -> list[str]:
        """A run resumes from a checkpoint; returns what is to be said of it at the start."""
        report = str(restored.report).splitlines()
        for line in () if restored.report.is_clean else report:
            self.warn(line)
        if "imported" in restored.manifest.meta:
            came, lacking = ("and optimizer ", "") if "optimizer" in restored.shared else ("", "optimizer, ")
            self.warn(f"weights {came}of another program: {lacking}schedule and position start from the beginning")
        elif not state.is_alike(restored) and not self._plan.is_bitwise:
            self.warn("another number of ranks or another mesh saved this: random generators start from the seed")
        for line in state.changes:
            self.warn(line)
        self.resume_compared(state.verdict)
        return report if restored.report.is_clean else []

    def resume_compared(self, verdict: Verdict | None) -> None:
        """What the steps after a checkpoint came to; None: nothing to say yet."""
        if verdict is not None:
            self.tell(
                ResumeCompared(
                    time=time.time(),
                    text=str(verdict),
                    passed=verdict.passed,
                    steps=verdict.steps,
                    component=verdict.component,
                )
            )

    def run_stopped(self, progress: Progress, why: StopReason, *, is_whole: bool) -> StopReason:
        """The run ends before its last epoch; returns why, with where. `is_whole`: at the end of an epoch."""
        at = f"epoch {progress.epoch + 1}" if is_whole else f"step {progress.step}"
        text = f"stopped after {at}: {why.reason}" + (f" [{why.by}]" if why.by else "")
        self.tell(
            RunStopped(
                time=time.time(),
                step=progress.step,
                epoch=progress.epoch,
                reason=why.reason,
                by=why.by,
                rank=why.rank,
                text=text,
            )
        )
        return why._replace(text=text)

    def run_ended(self, history: History) -> None:
        self.tell(
            RunEnded(
                time=time.time(),
                status="interrupted" if history.interrupted else "done",
                step=history.steps,
                seconds=history.total_time,
                samples_per_second=history.throughput,
                metrics=history.epochs[-1].metrics if history.epochs else {},
                model_path="" if self._plan.is_dev_run else history.checkpoint,
            )
        )


def nothing_to_resume(plan: Plan) -> str:
    """The decision of a run that was to resume, and is the first one in its folder."""
    return str(
        Decision("the run begins at step 0", f"nothing to resume in {plan.checkpoint.dir}", "resume_from_checkpoint")
    )
