"""What is rare: state that one rank alone has, stops amid a change, folders of earlier runs, tiny batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.survival import PER_EPOCH, STEPS, Undisturbed, fault, from_memory, start

NEVER = {"checkpoint_frequency": "1000 steps"}


UNCHANGED = {"buffer": "mask", "adam": True}


def test_constant_buffer_is_resumed_from_any_rank(tmp_path: Path, undisturbed: Undisturbed) -> None:
    faults = fault("training", rank=0, step=10), fault("training", rank=0, step=10, attempt=1)
    result = start(tmp_path, 2, *faults, options=UNCHANGED, **NEVER).end()
    result.assert_same_as(undisturbed(2, UNCHANGED, **NEVER))
    assert {source for source, _ in result.recoveries} == {"memory of rank 1"}
    assert {lost for _, lost in result.recoveries} == {0}
    assert len(set(result.digests)) == 1


def test_lazily_made_buffers_survive_killed_ranks(tmp_path: Path, undisturbed: Undisturbed) -> None:
    faults = fault("training", rank=1, step=1), fault("training", rank=1, step=10), fault("training", rank=0, step=20)
    result = start(tmp_path, 2, *faults, options=UNCHANGED | {"buffer": "lazy"}, **NEVER).end()
    result.assert_same_as(undisturbed(2, UNCHANGED, **NEVER))  # it makes what the other one begins with
    assert result.recoveries == from_memory(0, 0, 1)


def test_growing_buffers_and_loss_state_survive_killed_ranks(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"buffer": "grows"}
    faults = fault("training", rank=1, step=12), fault("evaluation", rank=1, step=2 * PER_EPOCH)
    result = start(tmp_path, 2, *faults, options=options, **NEVER).end()
    result.assert_same_as(undisturbed(2, options, **NEVER))
    assert result.recoveries == from_memory(0, 0)


def test_run_resumed_from_old_step_ignores_newer_checkpoints(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A checkpoint that the user went back from is newer than all that the new launch has saved."""
    settings = {"keep_last": 100}
    first = start(tmp_path, 2, **settings).end()
    expected = undisturbed(2).bytes
    assert first.bytes == expected
    assert {"step-000010", "step-000030"} <= {path.name for path in (tmp_path / "run/checkpoints").glob("step-*")}
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


def test_resize_with_one_sample_per_rank_uses_samples_once(tmp_path: Path) -> None:
    options = {"plain": True, "pace": 0.2}
    running = start(tmp_path, 3, options=options, batch_size=1, log_every_n_steps=1, epochs=1)
    for ranks, after in ((2, 3), (3, 9)):
        running.wait_for_step(after)
        running.resize(ranks)
        running.wait_for_world(ranks)
    running.hurry()
    result = running.end()
    assert result.code == 0, result.shown
    assert result.ledger.is_exact
    assert {lost for _, lost in result.recoveries} == {0}
    assert {event["global_batch"] for event in result.events_of("RunStarted")} == {3}


def test_rank_killed_after_an_epochs_last_step_keeps_its_bytes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"adam": True, "plateau": True}
    seldom = NEVER | {"log_every_n_steps": 1000}  # no loss of the epoch was read when the rank dies
    faults = fault("stepped", rank=1, step=PER_EPOCH), fault("stepped", rank=0, step=2 * PER_EPOCH)
    result = start(tmp_path, 2, *faults, options=options, **seldom).end()
    reference = undisturbed(2, options, **seldom)
    result.assert_same_as(reference)
    assert result.recoveries == from_memory(0, 1)
    rates = {event["learning_rate"] for event in reference.events_of("StepEnded")}
    assert len(rates) > 1, "the scheduler never saw a plateau"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_all_processes_of_a_job_saves_and_ends(tmp_path: Path, number: int) -> None:
    running = start(tmp_path, 2, options={"pace": 0.1}, log_every_n_steps=1)
    running.wait_for_step(2)
    everybody = set(running.processes())  # the launcher, its warm parent and the ranks
    ranks = {int(path.read_text()) for path in tmp_path.glob("pid-*")}
    parents = {psutil.Process(pid).ppid() for pid in ranks}
    assert len(parents) == 1
    assert ranks | parents < everybody
    assert len(everybody) == len(ranks) + 2, "this run has no launcher beside its warm parent"
    for pid in everybody:
        os.kill(pid, number)
    stopped = running.end()
    assert stopped.code == 143, stopped.shown
    ended = stopped.events_of("RunEnded")[-1]
    assert ended["status"] == "interrupted"
    assert ended["step"] < STEPS
    assert ended["model_path"].endswith(f"step-{ended['step']:06d}")
    assert (stopped.run_dir / "checkpoints" / f"step-{ended['step']:06d}" / "manifest.json").exists()


def test_unreadable_sample_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    """Its message has words of a lost connection, and is not one."""
    result = start(tmp_path, 2, fault("training", rank=0, step=2), options={"bad_sample": 100}).end()
    assert result.code == 1
    assert "read error in shard-17.parquet" in result.shown
    assert result.shown.count("Traceback (most recent call last)") == 1
    assert "in __getitem__" in result.shown
    assert len(result.events_of("AttemptEnded")) <= 2  # the kill, and the same error once before
    assert len(result.events_of("RankFailed")) == 1


@pytest.mark.parametrize("always", [False, True])
def test_rank_killed_after_fit_is_restarted_within_limits(tmp_path: Path, always: bool) -> None:
    faults = fault("after fit", "slow", rank=0), fault("after fit", rank=1, always=always)
    result = start(tmp_path, 2, *faults, max_restarts=2, epochs=1).end()
    ends = result.events_of("AttemptEnded")
    assert {event["rank"] for event in ends} == {1}
    if always:
        assert result.code == 1
        assert len(ends) == 2
        assert "SIGKILL" in result.shown
    else:
        assert result.code == 0, result.shown
        assert result.ledger.is_exact
        assert len(ends) == 1


@pytest.mark.soak  # decided in test_launch_supervisor.py without processes
def test_resize_request_of_an_earlier_run_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resize.json").write_text('{"ranks": 1}')
    result = start(tmp_path, 2, options={"pace": 0.02}).end()
    assert result.code == 0, result.shown
    assert not result.events_of("AttemptEnded")
    assert result.ledger.is_exact


def test_killed_rank_with_compression_resumes_from_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """What it had not sent is lost with it: the others hold all else, but go back to what was saved of all."""
    settings: dict[str, Any] = {"compression": "topk", "compression_ratio": 0.1, "compression_min_size": 32}
    faults = fault("training", rank=1, step=13), fault("training", rank=0, step=22)
    result = start(tmp_path, 2, *faults, **settings).end()
    result.assert_same_as(undisturbed(2, **settings))
    sources = [source for source, _ in result.recoveries]
    assert len(sources) == 2
    assert sources[0] in ("step-000005", "step-000010")
    assert sources[1] in ("step-000015", "step-000020")


def test_killed_rank_that_steps_alone_resumes_from_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Its replica is lost with it: the others go back to what was saved within a round, and to the same bytes."""
    settings: dict[str, Any] = {"synchronization": "diloco", "sync_every_n_steps": 4}
    faults = fault("training", rank=1, step=13), fault("training", rank=0, step=22)
    result = start(tmp_path, 2, *faults, **settings).end()
    result.assert_same_as(undisturbed(2, **settings))
    sources = [source for source, _ in result.recoveries]
    assert len(sources) == 2
    assert sources[0] in ("step-000005", "step-000010")
    assert sources[1] in ("step-000015", "step-000020")
