"""When a run looks, saves and ends, and where it stands: the policy that all engines' loops have in common."""

from __future__ import annotations

import pytest

from distributed.core.history import EpochRecord
from distributed.core.plan import BatchPlan, CheckpointPlan, FrequencyUnit, ObservePlan, Plan
from distributed.train.progress import Due, EpochSteps, Progress, record_epoch


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def due_of(every: float | None, unit: FrequencyUnit, clock: Clock | None = None, end: int | None = None) -> Due:
    checkpoint, observe = CheckpointPlan(every=every, unit=unit), ObservePlan(log_every=5)
    plan = Plan("run", BatchPlan(8), max_steps=end, checkpoint=checkpoint, observe=observe)
    return Due(plan, clock=clock or Clock())


def test_save_is_due_every_n_steps_but_not_at_an_epochs_last() -> None:
    due = due_of(3, "steps")
    assert [step for step in range(1, 13) if due.save_in_epoch(step, last=9)] == [3, 6, 12]
    assert due.save_after_epoch(Progress(epoch=1, step=9))
    assert not due.save_after_epoch(Progress(epoch=3, step=10))


def test_save_is_due_every_n_epochs() -> None:
    due = due_of(2, "epochs")
    assert [epoch for epoch in range(1, 7) if due.save_after_epoch(Progress(epoch=epoch, step=2))] == [2, 4, 6]
    assert not any(due.save_in_epoch(step, last=None) for step in range(1, 9))


def test_no_save_is_due_without_a_frequency() -> None:
    due = due_of(None, "steps")
    assert not any(due.save_in_epoch(step, last=None) for step in range(1, 9))
    assert not due.save_after_epoch(Progress(epoch=1, step=8))


def test_save_by_minutes_counts_from_the_last_save() -> None:
    clock = Clock()
    due = due_of(0.5, "minutes", clock)
    clock.now_s += 29.9
    assert not due.minutes_are_over(lambda is_due: is_due)
    clock.now_s += 0.1
    assert due.minutes_are_over(lambda is_due: is_due)
    due.saved()
    assert not due.minutes_are_over(lambda is_due: is_due)


def test_save_by_minutes_follows_the_agreement_of_ranks() -> None:
    assert due_of(5, "minutes").minutes_are_over(lambda is_due: True)


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_save_by_steps_or_epochs_needs_no_collective(unit: FrequencyUnit) -> None:
    def agree(is_due: bool) -> bool:
        raise AssertionError("a collective that no rank needs")

    assert not due_of(1, unit).minutes_are_over(agree)


def test_metrics_are_read_at_logs_saves_and_ends() -> None:
    due = due_of(None, "steps", end=13)
    assert [step for step in range(1, 14) if due.look(step, last=8, saves=step == 3)] == [3, 5, 8, 10, 13]


def test_run_is_over_at_its_last_step() -> None:
    assert [due_of(None, "steps", end=4).is_over(step) for step in (3, 4, 5)] == [False, True, True]
    assert not due_of(None, "steps").is_over(10**9)


def test_epoch_position_is_counted_in_samples_when_known() -> None:
    """Of 3 steps of 8 that the run took before, one of 12 has taken the samples of two."""
    progress = Progress(epoch=1, step=13, samples_in_epoch=24, steps_in_epoch=3)
    assert EpochSteps.of(progress, 12, samples_per_epoch=60, steps_per_epoch=5) == EpochSteps(2, 11, 16)
    assert EpochSteps.of(progress, 12, samples_per_epoch=None, steps_per_epoch=None) == EpochSteps(3, 10, None)


def test_progress_of_untaken_steps_is_rolled_back() -> None:
    progress = Progress(epoch=1, step=10)
    within = EpochSteps.of(progress, 8, samples_per_epoch=24, steps_per_epoch=3)
    progress.end_step(11, within, 8)
    progress.end_step(12, within, 5)
    assert progress == Progress(epoch=1, step=12, samples_in_epoch=13, steps_in_epoch=2)
    progress.go_back(1, 5)
    assert progress == Progress(epoch=1, step=11, samples_in_epoch=8, steps_in_epoch=1)
    progress.begin_next_epoch()
    assert progress == Progress(epoch=2, step=11)


def test_epoch_record_counts_only_its_own_steps() -> None:
    epochs: list[EpochRecord] = []
    record_epoch(epochs, 0, 5, samples=40, seconds=2.0, metrics={"loss": 1.0})
    record = record_epoch(epochs, 1, 8, samples=24, seconds=1.0, metrics={})
    assert [before.steps for before in epochs] == [5, 3]
    assert epochs[1] is record
