"""Where a run stands between its steps, and when it looks, saves and ends: one policy for the loops of all engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from distributed.core.history import EpochRecord, EvaluationRecord
from distributed.core.plan import Plan


@dataclass
class Progress:
    """How far training has come; a position in an epoch is a number of samples, so any number of ranks can resume."""

    epoch: int = 0
    step: int = 0  # optimizer steps of the whole run
    samples_in_epoch: int = 0
    steps_in_epoch: int = 0  # by which a stream, whose batches may be short in the middle, finds its place
    evaluated_at: int = -1  # the step after which the validation data was evaluated last
    evaluations: int = 0

    def end_step(self, step: int, within: EpochSteps, samples: int) -> None:
        """A step of the run, by its number, that took that many samples."""
        self.step, self.steps_in_epoch = step, step - within.before
        self.samples_in_epoch += samples

    def go_back(self, steps: int, samples: int) -> None:
        """Steps of this epoch that were not taken after all, and their samples."""
        self.step, self.steps_in_epoch = self.step - steps, self.steps_in_epoch - steps
        self.samples_in_epoch -= samples

    @property
    def position(self) -> dict[str, int]:
        """Where the training stands; when it was evaluated is no part of that."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("evaluat")}

    def end_evaluation(self) -> None:
        self.evaluated_at, self.evaluations = self.step, self.evaluations + 1

    def begin_next_epoch(self) -> None:
        self.epoch, self.samples_in_epoch, self.steps_in_epoch = self.epoch + 1, 0, 0


@dataclass(frozen=True)
class EpochSteps:
    """The steps of an epoch that a run resumes, or begins."""

    first: int  # those of the epoch that are done
    before: int  # those of the run before the epoch
    last: int | None  # the number of the run's step that ends the epoch; None: not known

    def is_part(self, step: int, part: float) -> bool:
        """Whether a step of the run ends a multiple of this part of the epoch, and not the epoch itself.

        >>> within = EpochSteps(first=0, before=10, last=20)
        >>> [step for step in range(11, 21) if within.is_part(step, 0.3)]
        [13, 16, 19]
        """
        if self.last is None or step >= self.last:
            return False
        length, done = self.last - self.before, step - self.before
        number = round(done / (part * length), 9) // 1  # of the parts that are over
        return number >= 1 and done - 1 < round(number * part * length, 9)

    @staticmethod
    def of(
        progress: Progress, global_batch: int, *, samples_per_epoch: int | None, steps_per_epoch: int | None
    ) -> EpochSteps:
        """Samples count where they are known, so that another number of ranks can resume.

        >>> EpochSteps.of(Progress(step=9, samples_in_epoch=17), 8, samples_per_epoch=48, steps_per_epoch=6)
        EpochSteps(first=3, before=6, last=12)
        """
        first = progress.steps_in_epoch
        if samples_per_epoch is not None:
            first = -(-progress.samples_in_epoch // global_batch)  # the last step may be short
        before = progress.step - first
        return EpochSteps(first, before, before + steps_per_epoch if steps_per_epoch else None)


class RunTime:
    """The seconds that a run has trained, over all of its parts.

    >>> times = iter([10.0, 13.0, 20.0, 22.0])
    >>> spent = RunTime(clock=lambda: next(times))
    >>> spent.seconds
    3.0
    >>> spent.load(100.0)
    >>> spent.seconds
    102.0
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since, self._before = clock, clock(), 0.0

    @property
    def seconds(self) -> float:
        return self._before + self._clock() - self._since

    def load(self, seconds: float) -> None:
        """The run resumes from a state that was reached after that time."""
        self._before, self._since = seconds, self._clock()


class Due:
    """When a run looks at its numbers, evaluates, saves and ends, by its plan."""

    def __init__(self, plan: Plan, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._checkpoint, self._log_every, self._end = plan.checkpoint, plan.observe.log_every, plan.max_steps
        self._validation, self._epochs, self._most_s = plan.validation, plan.epochs, plan.max_time_s
        self._clock, self._last_save, self._last_evaluation = clock, clock(), clock()

    def is_over(self, step: int) -> bool:
        """Whether a run that stands at this step takes no more."""
        return self._end is not None and step >= self._end

    def time_is_over(self, spent_s: float, agree: Callable[[bool], bool]) -> bool:
        """Of a run that has trained for so long; `agree` as below."""
        return self._most_s is not None and agree(spent_s >= self._most_s)

    @property
    def saves_within_epochs(self) -> bool:
        """Whether steps are saved for their number; else `save_in_epoch` need not be asked."""
        return self._checkpoint.every is not None and self._checkpoint.unit == "steps"

    @property
    def evaluates_within_epochs(self) -> bool:
        """Whether steps are evaluated for their number; else `evaluate_in_epoch` need not be asked."""
        every, unit = self._validation.every, self._validation.unit
        return unit == "steps" or (unit == "epochs" and every < 1)

    def save_in_epoch(self, step: int, last: int | None) -> bool:
        """Whether a step is saved right after it; the last one of an epoch is, after the evaluation."""
        return step != last and self._save("steps", step)

    def look(self, step: int, last: int | None, *, saves: bool) -> bool:
        """Whether the numbers of a step are read: what is not finite is not saved."""
        return saves or step % self._log_every == 0 or step in (last, self._end)

    def evaluate_in_epoch(self, step: int, within: EpochSteps) -> bool:
        """Whether the validation data is evaluated right after a step, for the sake of that step."""
        every, unit = self._validation.every, self._validation.unit
        if unit == "steps":
            return step % every == 0
        return unit == "epochs" and every < 1 and within.is_part(step, every)

    def evaluate_after_epoch(self, progress: Progress, *, is_last: bool) -> bool:
        """Whether it is evaluated at the end of an epoch; `is_last`: of the last one of the run, or its last step."""
        if self._validation.is_by_epoch:
            every = max(1, int(self._validation.every))
            return is_last or progress.epoch + 1 == self._epochs or (progress.epoch + 1) % every == 0
        is_over = is_last or progress.epoch + 1 == self._epochs
        return is_over and progress.evaluated_at != progress.step

    def evaluation_minutes_are_over(self, agree: Callable[[bool], bool]) -> bool:
        """Since the last evaluation; `agree` as for saves."""
        if self._validation.unit != "minutes":
            return False
        return agree(self._clock() - self._last_evaluation >= 60 * self._validation.every)

    def evaluated(self) -> None:
        self._last_evaluation = self._clock()

    def save_after_evaluation(self, progress: Progress) -> bool:
        """Whether the state is saved right after an evaluation."""
        return self._save("validations", progress.evaluations)

    def save_after_epoch(self, progress: Progress) -> bool:
        """Whether the end of a whole epoch is saved; `progress` stands at the next one."""
        is_evaluated = progress.evaluated_at == progress.step
        by_evaluation = is_evaluated and self.save_after_evaluation(progress)
        return self._save("epochs", progress.epoch) or self._save("steps", progress.step) or by_evaluation

    def minutes_are_over(self, agree: Callable[[bool], bool]) -> bool:
        """Since the last save; `agree` makes the answer of the first rank that of all, and is asked only then."""
        every = self._checkpoint.every
        if every is None or self._checkpoint.unit != "minutes":
            return False
        return agree(self._clock() - self._last_save >= 60 * every)

    def saved(self) -> None:
        self._last_save = self._clock()

    def _save(self, unit: str, count: int) -> bool:
        every = self._checkpoint.every
        return every is not None and self._checkpoint.unit == unit and count % every == 0


def record_epoch(
    epochs: list[EpochRecord], epoch: int, step: int, *, samples: int, seconds: float, metrics: dict[str, float]
) -> EpochRecord:
    """Add the record of an epoch, or of the part that a run took of it, to those up to `step`."""
    record = EpochRecord(epoch, step - sum(before.steps for before in epochs), samples, seconds, metrics)
    epochs.append(record)
    return record


def rating(best: str, metrics: Mapping[str, float], evaluations: Sequence[EvaluationRecord], step: int) -> float | None:
    """By which the state after a step may be the `best`; None: only an earlier state of its epoch was measured.

    >>> rating("min:val_loss", {"val_loss": 0.5}, [EvaluationRecord(4, 0, 1.0, {"val_loss": 0.5})], step=6)
    """
    name = best.partition(":")[2]
    if evaluations and name in evaluations[-1].metrics and evaluations[-1].step != step:
        return None
    return metrics.get(name) if name else None
