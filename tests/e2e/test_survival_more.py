"""What is rare: state that one rank alone has, stops amid a change, folders of earlier runs, tiny batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.survival import PER_EPOCH, Running, Undisturbed, fault, from_memory, start, wait_until

NEVER = {"checkpoint_frequency": "1000 steps"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(lambda: tmp_path_factory.mktemp("undisturbed"))


def test_ranks_without_the_buffers_that_count_begin_anew(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"buffer": "counter", "adam": True}
    result = start(tmp_path, 2, fault("training", rank=0, step=20), options=options, **NEVER).end()
    reference = undisturbed(2, options, **NEVER)
    result.assert_same_as(reference)
    assert result.recoveries == [("the beginning", 19)]
    assert len(result.digests) == 2
    assert result.digests == reference.digests
    assert len(set(result.digests)) == 1


def test_a_buffer_that_nothing_changes_is_held_by_all(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"buffer": "mask", "adam": True}
    faults = fault("training", rank=0, step=20), fault("training", rank=0, step=20, attempt=1)
    result = start(tmp_path, 2, *faults, options=options, **NEVER).end()
    result.assert_same_as(undisturbed(2, options, **NEVER))
    assert {source for source, _ in result.recoveries} == {"memory of rank 1"}
    assert {lost for _, lost in result.recoveries} == {0}
    assert len(set(result.digests)) == 1


def test_buffers_that_a_model_makes_as_it_goes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"buffer": "lazy"}
    faults = fault("training", rank=1, step=1), fault("training", rank=1, step=20), fault("training", rank=0, step=33)
    result = start(tmp_path, 2, *faults, options=options, **NEVER).end()
    result.assert_same_as(undisturbed(2, options, **NEVER))
    assert result.recoveries == from_memory(0, 0, 1)


def test_buffers_that_grow_and_a_loss_that_counts(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"buffer": "grows"}
    faults = fault("training", rank=1, step=20), fault("evaluation", rank=1, step=3 * PER_EPOCH)
    result = start(tmp_path, 2, *faults, options=options, **NEVER).end()
    result.assert_same_as(undisturbed(2, options, **NEVER))
    assert result.recoveries == from_memory(0, 0)


def test_a_run_that_went_back_does_not_jump_ahead(tmp_path: Path) -> None:
    """A checkpoint that the user went back from is newer than all that the new launch has saved."""
    settings = {"keep_last": 100}
    first = start(tmp_path, 2, **settings).end()
    expected = first.bytes
    assert {"step-000010", "step-000040"} <= {path.name for path in (tmp_path / "run/checkpoints").glob("step-*")}
    again = start(
        tmp_path,
        2,
        fault("training", "kill all", rank=0, step=21),
        options={"pace": 0.02},
        resume_from_checkpoint=str(tmp_path / "run/checkpoints/step-000010"),
        **settings,
    ).end()
    assert again.code == 0, again.shown
    ((source, lost),) = again.recoveries
    assert source.startswith(("step-000010", "step-000015", "step-000020"))  # with its run behind it
    assert lost == 20 - int(source.split("-")[1])
    assert again.ledger.is_exact
    assert again.bytes == expected


def test_one_sample_a_rank_and_another_number_of_ranks(tmp_path: Path) -> None:
    running = start(tmp_path, 3, options={"plain": True, "pace": 0.01}, batch_size=1, log_every_n_steps=1)
    for ranks, after in ((2, 10), (3, 100)):
        running.wait_for_step(after)
        running.resize(ranks)
        running.wait_for("Recovered", lambda event, ranks=ranks: event["world_size"] == ranks)  # type: ignore[misc]
    result = running.end()
    assert result.code == 0, result.shown
    assert result.ledger.is_exact
    assert {lost for _, lost in result.recoveries} == {0}
    assert {event["global_batch"] for event in result.told("RunStarted")} == {3}


def test_a_rank_is_killed_after_the_last_step_of_an_epoch(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"adam": True, "plateau": True}
    seldom = NEVER | {"log_every_n_steps": 1000}  # no loss of the epoch was read when the rank dies
    faults = fault("stepped", rank=1, step=PER_EPOCH), fault("stepped", rank=0, step=2 * PER_EPOCH)
    result = start(tmp_path, 2, *faults, options=options, **seldom).end()
    reference = undisturbed(2, options, **seldom)
    result.assert_same_as(reference)
    assert result.recoveries == from_memory(0, 1)
    rates = {event["learning_rate"] for event in reference.told("StepEnded")}
    assert len(rates) > 1, "the scheduler never saw a plateau"


@pytest.mark.parametrize("moment", ["asked", "between two worlds"])
def test_a_stop_while_ranks_change(tmp_path: Path, undisturbed: Undisturbed, moment: str) -> None:
    settings = {"reproducible": "bitwise", "virtual_ranks": 4}
    running = start(tmp_path, 2, options={"pace": 0.02}, **settings)
    running.wait_for_step(10)
    running.resize(4)
    if moment == "between two worlds":
        running.wait_for("AttemptEnded")
    assert_saved_and_goes_on(running, undisturbed, **settings)


def test_a_stop_right_after_a_rank_was_killed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    running = start(tmp_path, 2, fault("training", rank=1, step=20), options={"pace": 0.02})
    wait_until((tmp_path / "fault-0").exists, "a rank is killed")
    assert_saved_and_goes_on(running, undisturbed)


def assert_saved_and_goes_on(running: Running, undisturbed: Undisturbed, **settings: object) -> None:
    os.kill(running.process.pid, signal.SIGTERM)
    assert assert_saved(running) < 60  # else it was not stopped in the middle
    result = start(running.folder, 2, resume_from_checkpoint=True, **settings).end()
    result.assert_same_as(undisturbed(2, **settings))


def assert_saved(running: Running) -> int:
    """That it ended in order; returns its last step."""
    stopped = running.end()
    assert stopped.code == 143, stopped.shown
    ended = stopped.told("RunEnded")[-1]
    assert ended["status"] == "interrupted"
    assert ended["model_path"].endswith(f"step-{ended['step']:06d}")
    assert (stopped.run_dir / "checkpoints" / f"step-{ended['step']:06d}" / "manifest.json").exists()
    return int(ended["step"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_a_job(tmp_path: Path, number: int) -> None:
    running = start(tmp_path, 2, options={"pace": 0.02})
    running.wait_for_step(10)
    everybody = [psutil.Process(running.process.pid), *psutil.Process(running.process.pid).children(recursive=True)]
    ranks = {int(path.read_text()) for path in tmp_path.glob("pid-*")}
    parents = {psutil.Process(pid).ppid() for pid in ranks}
    assert ranks | parents < {process.pid for process in everybody}
    assert running.process.pid not in parents, "this run has no warm parent"
    for process in everybody:
        process.send_signal(number)
    assert assert_saved(running) < 60


def test_a_sample_that_cannot_be_read_ends_the_run(tmp_path: Path) -> None:
    """Its message has words of a lost connection, and is not one."""
    result = start(tmp_path, 2, fault("training", rank=0, step=2), options={"bad_sample": 100}).end()
    assert result.code == 1
    assert "read error in shard-17.parquet" in result.shown
    assert result.shown.count("Traceback (most recent call last)") == 1
    assert "in __getitem__" in result.shown
    assert len(result.told("AttemptEnded")) <= 2  # the kill, and the same error once before
    assert len(result.told("RankFailed")) == 1


@pytest.mark.parametrize("always", [False, True])
def test_a_rank_dies_after_fit_while_another_is_there(tmp_path: Path, undisturbed: Undisturbed, always: bool) -> None:
    faults = fault("after fit", "slow", rank=0), fault("after fit", rank=1, always=always)
    result = start(tmp_path, 2, *faults, max_restarts=2).end()
    ends = result.told("AttemptEnded")
    assert {event["rank"] for event in ends} == {1}
    if always:
        assert result.code == 1
        assert len(ends) == 2
        assert "SIGKILL" in result.shown
    else:
        result.assert_same_as(undisturbed(2))
        assert len(ends) == 1


def test_a_wish_of_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resize.json").write_text('{"ranks": 1}')
    result = start(tmp_path, 2, options={"pace": 0.02}).end()
    assert result.code == 0, result.shown
    assert not result.told("AttemptEnded")
    assert result.ledger.is_exact
