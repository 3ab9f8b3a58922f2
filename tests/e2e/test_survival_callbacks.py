"""Runs with callbacks and averaged weights that lose ranks: each call counts once, and the averages are the same."""

from __future__ import annotations

from pathlib import Path

from distributed.checkpoint.restore.reading import load
from tests.e2e.survival import EPOCHS, PER_EPOCH, STEPS, Result, Undisturbed, fault, from_memory, start

CALLBACKS = {"callbacks": True}


def calls(result: Result) -> dict[str, int]:
    last = sorted((result.run_dir / "checkpoints").glob("step-*"))[-1]
    return load(str(last), ranks=()).shared["callbacks"]["state"]["Watched"]["calls"]


def test_killed_ranks_leave_callbacks_and_averages_the_same(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """In each hook, and in an evaluation, in which the model has the averages."""
    result = start(
        tmp_path,
        2,
        fault("on_epoch_start", rank=1, step=0),
        fault("on_step_end", rank=0, step=4),
        fault("evaluation", rank=1, step=PER_EPOCH),
        fault("on_validation_end", rank=0, step=PER_EPOCH, attempt=3),
        fault("on_epoch_end", rank=1, step=PER_EPOCH, attempt=4),
        fault("on_epoch_start", rank=0, step=PER_EPOCH, attempt=5),
        fault("training", "kill all", rank=0, step=15),
        fault("evaluation", rank=0, step=2 * PER_EPOCH),
        fault("on_fit_end", rank=1, step=STEPS),
        options=CALLBACKS,
    ).end()
    whole = undisturbed(2, options=CALLBACKS)
    result.assert_same_as(whole)
    each = dict.fromkeys(("on_epoch_start", "on_epoch_end", "on_validation_start", "on_validation_end"), EPOCHS)
    assert calls(result) == calls(whole) == {**each, "on_step_end": STEPS, "on_fit_end": 1}
    # Of losses with no step between them the last is told, and of that after the last step none.
    first, second, third, from_disk, last = result.recoveries
    assert [first, second, third, last] == from_memory(0, 1, 1, 1)
    assert from_disk[0] in ("step-000005", "step-000010"), "the newest one may not have been published yet"
    assert len(result.events_of("AttemptEnded")) >= 9
