"""Where a run stands between its steps, and when it looks, saves and ends: one policy for the loops of all engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from distributed.core.history import EpochRecord
from distributed.core.plan import Plan


@dataclass
class Progress:
    """How far training has come; a position in an epoch is a number of samples, so any number of ranks can go on."""

    epoch: int = 0
    step: int = 0  # optimizer steps of the whole run
    samples_in_epoch: int = 0
    steps_in_epoch: int = 0  # by which a stream, whose batches may be short in the middle, finds its place

    def end_step(self, step: int, within: EpochSteps, samples: int) -> None:
        """A step of the run, by its number, that took so many samples."""
        self.step, self.steps_in_epoch = step, step - within.before
        self.samples_in_epoch += samples

    def go_back(self, steps: int, samples: int) -> None:
        """Steps of this epoch that were not taken after all, and their samples."""
        self.step, self.steps_in_epoch = self.step - steps, self.steps_in_epoch - steps
        self.samples_in_epoch -= samples

    def begin_next_epoch(self) -> None:
        self.epoch, self.samples_in_epoch, self.steps_in_epoch = self.epoch + 1, 0, 0


@dataclass(frozen=True)
class EpochSteps:
    """The steps of an epoch that a run goes on with, or begins."""

    first: int  # those of the epoch that are done
    before: int  # those of the run before the epoch
    last: int | None  # the number of the run's step that ends the epoch; None: not known

    @staticmethod
    def of(
        progress: Progress, global_batch: int, *, samples_per_epoch: int | None, steps_per_epoch: int | None
    ) -> EpochSteps:
        """Samples count where they are known, so that another number of ranks can go on.

        >>> EpochSteps.of(Progress(step=9, samples_in_epoch=17), 8, samples_per_epoch=48, steps_per_epoch=6)
        EpochSteps(first=3, before=6, last=12)
        """
        first = progress.steps_in_epoch
        if samples_per_epoch is not None:
            first = -(-progress.samples_in_epoch // global_batch)  # the last step may be short
        before = progress.step - first
        return EpochSteps(first, before, before + steps_per_epoch if steps_per_epoch else None)


class Due:
    """When a run looks at its numbers, saves and ends, by its plan."""

    def __init__(self, plan: Plan, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._checkpoint, self._log_every, self._end = plan.checkpoint, plan.observe.log_every, plan.max_steps
        self._clock, self._last_save = clock, clock()

    def is_over(self, step: int) -> bool:
        """Whether a run that stands at this step takes no more."""
        return self._end is not None and step >= self._end

    def save_in_epoch(self, step: int, last: int | None) -> bool:
        """Whether a step is saved right after it; the last one of an epoch is, after the evaluation."""
        return step != last and self._save("steps", step)

    def look(self, step: int, last: int | None, *, saves: bool) -> bool:
        """Whether the numbers of a step are read: what is not finite is not saved."""
        return saves or step % self._log_every == 0 or step in (last, self._end)

    def save_after_epoch(self, progress: Progress) -> bool:
        """Whether the end of a whole epoch is saved; `progress` stands at the next one."""
        return self._save("epochs", progress.epoch) or self._save("steps", progress.step)

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
    """Add the record of an epoch, or of the part that a run took of it, to those of the run that stands at `step`."""
    record = EpochRecord(epoch, step - sum(before.steps for before in epochs), samples, seconds, metrics)
    epochs.append(record)
    return record
