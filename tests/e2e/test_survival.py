"""Ranks that are killed, hang or fail: the run goes on, and ends with the bytes and samples of one never hurt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environ
from tests.e2e.survival import (
    PER_EPOCH,
    STEPS,
    Result,
    Running,
    Undisturbed,
    fault,
    from_memory,
    launching_python,
    start,
    start_alone,
    wait_until,
)

SLOW = {"pace": 0.2}  # steps that do not come to the end of the run before a signal comes


def causes(result: Result) -> list[tuple[str, int]]:
    return [(event["cause"], event["rank"]) for event in result.events_of("AttemptEnded")]


def test_killing_each_of_two_ranks_resumes_with_same_bytes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """At all kinds of steps, and with errors and a lack of memory that pass between the kills."""
    result = start(
        tmp_path,
        2,
        fault("training", rank=1, step=1),
        fault("training", rank=0, step=7),
        fault("evaluation", rank=1, step=PER_EPOCH),
        fault("training", "raise", rank=1, step=12),
        fault("training", "no memory", rank=0, step=15),
        fault("training", rank=1, step=2 * PER_EPOCH),
        fault("training", "killed for memory", rank=0, step=22),
        fault("training", rank=0, step=3 * PER_EPOCH),
        fault("evaluation", rank=0, step=3 * PER_EPOCH),
        fault("training", rank=1, step=STEPS),
    ).end()
    result.assert_same_as(undisturbed(2))
    machine, code = "machine", "code"
    kinds = (machine, machine, machine, code, code, machine, machine, machine, machine, machine)
    assert causes(result) == list(zip(kinds, (1, 0, 1, 1, 0, 1, 0, 0, 0, 1), strict=True))
    assert result.recoveries == from_memory(0, 1, 0, 0, 1, 0, 1, 1, 1, 0)
    assert "Traceback" not in result.shown
    assert "end of the script" in result.shown


def test_killing_each_of_three_ranks_resumes_with_same_bytes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        3,
        fault("training", rank=0, step=1),
        fault("training", rank=1, step=8),
        fault("training", rank=2, step=2 * PER_EPOCH),
        fault("evaluation", rank=1, step=3 * PER_EPOCH),
        fault("training", rank=1, step=30),  # and another one before a step is made
        fault("training", rank=0, step=30, attempt=5),
    ).end()
    result.assert_same_as(undisturbed(3))
    assert {lost for _, lost in result.recoveries} == {0}
    assert all(source.startswith("memory of rank") for source, _ in result.recoveries)
    assert len(result.events_of("AttemptEnded")) == 6


def test_a_rank_is_killed_while_ranks_meet_and_save(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("meeting", rank=1),
        fault("training", rank=1, step=3),
        fault("start", rank=1, attempt=2),  # the one that takes its place, before it comes to the loop
        fault("training", rank=0, step=6),
        fault("before survivor state is sent", rank=0, attempt=4),
        fault("training", rank=1, step=9),
        fault("taking over", rank=1, attempt=6),
        fault("copied", rank=1, attempt=7),
        fault("chunks written", rank=1, attempt=8),
        fault("part written", rank=0, attempt=9),
        fault("before the manifest", rank=0, attempt=10),
        fault("manifest written", rank=0, attempt=11),
        checkpoint_frequency="2 steps",  # there is a next one for each of these
    ).end()
    result.assert_same_as(undisturbed(2))
    assert result.recoveries == [("the beginning", 0), *from_memory(0, 1, 0), *from_memory(0, 0, 1, 1, 1)]
    assert len(result.events_of("AttemptEnded")) == 12


def test_killing_all_ranks_resumes_from_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("training", "kill all", rank=0, step=3),  # before there is a checkpoint
        fault("training", "kill all", rank=1, step=13),
        fault("training", "kill the parent", rank=1, step=23),
        fault("training", rank=0, step=34),  # one after the other, with no step between
        fault("training", rank=1, step=34, attempt=4),
    ).end()
    result.assert_same_as(undisturbed(2))
    sources = [source for source, _ in result.recoveries]
    assert sources[0] == "the beginning"
    assert sources[1] in ("step-000005", "step-000010")  # the newest one may not have been published yet
    assert sources[2] in ("step-000015", "step-000020")
    # Ranks that die together end one attempt or two, so either rank is first to die at step 34. The other dies right
    # after it resumed, before or after that is reported; the rank that replaced the first may hold the state by then.
    memory = {"memory of rank 0", "memory of rank 1"}
    assert len(sources) <= 5
    assert set(sources[3:-1]) <= memory
    assert sources[-1] in memory - set(sources[3:-1]) | {"step-000025", "step-000030"}
    assert [bool(lost) for _, lost in result.recoveries[:3]] == [True, True, True]
    assert {cause for cause, _ in causes(result)} == {"machine"}


def test_stopped_and_killed_runs_resume_with_same_bytes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """By each signal, also right after a rank was killed, and by the end of its launcher; no step is made twice."""
    logged = {"log_every_n_steps": 1}
    first = 0
    for number, settings in ((signal.SIGTERM, {}), (signal.SIGUSR1, {"requeue_exit_code": 75})):
        running = start(tmp_path, 2, options=SLOW, resume_from_checkpoint=bool(first), **logged, **settings)
        running.wait_for_step(first + 2)
        os.kill(running.process.pid, number)
        first = assert_saved(running, after=first, code=settings.get("requeue_exit_code", 143))
    killed = fault("training", rank=1, step=first + 3)
    running = start(tmp_path, 2, killed, options=SLOW, resume_from_checkpoint=True, **logged)
    wait_until((tmp_path / "fault-0").exists, "a rank is killed")
    os.kill(running.process.pid, signal.SIGTERM)
    first = assert_saved(running, after=first)
    running = start(tmp_path, 2, options=SLOW, resume_from_checkpoint=True, checkpoint_frequency="2 steps", **logged)
    running.wait_for_step(first + 4)
    running.process.kill()
    assert running.end().code == -signal.SIGKILL  # and nothing is left
    result = start(tmp_path, 2, resume_from_checkpoint=True, **logged).end()
    result.assert_same_as(undisturbed(2))
    assert first < result.events_of("RunStarted")[-1]["first_step"] < STEPS


def assert_saved(running: Running, *, after: int, code: int = 143) -> int:
    """That it went on from a step, was stopped amid the run and ended in order; returns its last step."""
    stopped = running.end()
    assert stopped.code == code, stopped.shown
    assert running.events("RunStarted")[0]["first_step"] == after
    ended = stopped.events_of("RunEnded")[-1]
    assert ended["status"] == "interrupted"
    assert ended["model_path"].endswith(f"step-{ended['step']:06d}")
    assert (stopped.run_dir / "checkpoints" / f"step-{ended['step']:06d}" / "manifest.json").exists()
    assert ended["step"] < STEPS
    return int(ended["step"])


def test_rank_0_buffers_survive_killed_ranks(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Only rank 0 has those that count, which the run must be told."""
    options = {"own_buffer": True, "buffer": "counter", "adam": True, "settings": {"check_replicas": "parameters"}}
    faults = [fault("training", rank=rank, step=step) for rank, step in ((0, 4), (1, 12), (0, 23))]
    result, reference = start(tmp_path, 2, *faults, options=options).end(), undisturbed(2, options)
    result.assert_same_as(reference)
    assert result.recoveries[:2] == [("the beginning", 3), ("memory of rank 0", 0)]
    assert result.recoveries[2][0] in ("step-000015", "step-000020")
    assert len(result.digests) == 2
    assert result.digests == reference.digests
    assert len(set(result.digests)) == 1


def test_hung_ranks_are_named_and_replaced_with_same_bytes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """And not those that are slow for a reason."""
    result = start(
        tmp_path,
        2,
        fault("training", "slow", rank=1, step=1),  # as when it compiles
        fault("copied", "slow", rank=1),
        fault("part written", "slow", rank=0),
        fault("evaluation", "slow", rank=0, step=PER_EPOCH),
        fault("training", "hang", rank=1, step=12),
        fault("training", "extra barrier", rank=0, step=17),
        fault("training", "stop", rank=0, step=23),
        fault("reading", "hang", rank=1, step=4),  # a sample
        hang_timeout_s=2,
    ).end()
    result.assert_same_as(undisturbed(2))
    assert all((tmp_path / f"fault-{number}").exists() for number in range(8))
    stalls = result.events_of("RankStalled")
    assert causes(result) == [("hang", event["rank"]) for event in stalls]
    first, barrier, stopped = (next(e for e in stalls if e["step"] == step) for step in (11, 16, 22))
    (reading,) = (event for event in stalls if event not in (first, barrier, stopped))
    assert [event["rank"] for event in (first, barrier, stopped, reading)] == [1, 0, 0, 1]
    assert "train.py:" in first["where"]
    assert "in hang_in_user_code" in first["where"]
    assert "in hang_in_user_code" in reading["where"]
    assert "rank 0 in 'barrier'" in barrier["where"]
    assert "SIGSTOP" in stopped["where"]
    for event in stalls:
        assert event["waiting"] == [1 - event["rank"]]
        assert event["late_seconds"] > event["deadline_seconds"] == 2
        assert event is stopped or "hang_in_user_code" in Path(event["stack_path"]).read_text() or event is barrier
    assert result.recoveries == from_memory(*(1 - event["rank"] for event in result.events_of("RankStalled")))


def test_slow_ranks_are_replaced_with_same_bytes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Also rank 0: of replicas whose buffers are alike, each holds the run."""
    options = {"plain": True, "adam": True}  # with BatchNorm over all ranks, none of them is seen to be slow
    result = start(
        tmp_path,
        2,
        fault("stepped", "drag", rank=1, step=2),
        fault("stepped", "drag", rank=0, step=13),
        options=options,
        slow_rank="replace",
        slow_rank_wait_s=1,
        log_every_n_steps=1,
    ).end()
    result.assert_same_as(undisturbed(2, options))
    assert causes(result) == [("slow", 1), ("slow", 0)]
    assert result.recoveries == from_memory(0, 1)
    assert "the median of the ranks since step" in result.events_of("AttemptEnded")[0]["message"]


@pytest.mark.soak  # decided in test_launch_supervisor.py without processes
def test_same_error_twice_ends_the_run(tmp_path: Path) -> None:
    result = start(tmp_path, 2, fault("training", "raise", rank=1, step=20, always=True)).end()
    assert result.code == 1
    assert len(result.events_of("AttemptEnded")) == 1
    assert [event["rank"] for event in result.events_of("RankFailed")] == [1]
    assert result.shown.count("Traceback (most recent call last)") == 1
    assert "in suffer" in result.shown


@pytest.mark.soak  # decided in test_launch_supervisor.py without processes
def test_rank_that_exits_0_in_mid_run_is_named(tmp_path: Path) -> None:
    result = start(tmp_path, 2, fault("training", "exit well", rank=1, step=20, always=True)).end()
    assert result.code == 1
    assert [event["cause"] for event in result.events_of("AttemptEnded")] == ["code"]
    assert [
        (event["rank"], "exit code 0 after step 19" in event["message"]) for event in result.events_of("RankFailed")
    ] == [(1, True)]
    assert "rank 1" in result.shown


@pytest.mark.parametrize(
    ("what", "code"), [({"place": "training", "step": 1}, 1), ({"place": "start"}, 1), ({"nan_at": 3}, 6)]
)
def test_first_step_start_and_nan_errors_are_not_restarted(tmp_path: Path, what: dict[str, Any], code: int) -> None:
    faults = [] if "nan_at" in what else [fault(what="raise", rank=1, **what)]
    result = start(tmp_path, 2, *faults, options=what if "nan_at" in what else None).end()
    assert result.code == code
    assert not result.events_of("AttemptEnded")
    assert len(result.events_of("RankFailed")) == 1
    assert result.shown.count("Traceback (most recent call last)") == 1


@pytest.fixture(scope="module")
def plain_script(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """`fit` in a script that nobody launched, with a data loader's workers, one of which hangs."""
    faults = (
        fault("reading", "hang", step=11),  # a sample of the eighth step: the first ones have no deadline
        fault("training", rank=0, step=14),
        fault("training", rank=1, step=21),
        fault("training", "raise", step=28),
    )
    folder = tmp_path_factory.mktemp("plain")
    return start_alone(folder, 2, *faults, options={"workers": 1}, hang_timeout_s=2).end()


def test_fit_in_plain_script_survives_killed_ranks(plain_script: Result, undisturbed: Undisturbed) -> None:
    plain_script.assert_same_as(undisturbed(2))
    assert sorted(cause for cause, _ in causes(plain_script)) == ["code", "hang", "machine", "machine"]
    assert {lost for _, lost in plain_script.recoveries} == {0}
    assert "end of the script" in plain_script.shown


def test_hung_data_loader_worker_is_named_and_replaced(plain_script: Result) -> None:
    (stall,) = plain_script.events_of("RankStalled")
    assert "hang_in_user_code" in stall["where"]
    assert "worker" in stall["where"]
    assert stall["waiting"] == [1 - stall["rank"]]


def test_half_precision_and_accumulation(tmp_path: Path, undisturbed: Undisturbed) -> None:
    settings = {"mixed_precision": "fp16", "gradient_accumulation_steps": 2}
    faults = (
        fault("training", rank=0, step=21),
        fault("training", rank=1, step=42),
    )  # in the first micro-batch, the second
    result = start(tmp_path, 2, *faults, **settings).end()
    result.assert_same_as(undisturbed(2, **settings))
    assert result.recoveries == from_memory(1, 0)


def test_killed_rank_without_warm_start_is_replaced(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(tmp_path, 2, fault("training", rank=0, step=14), warm_start=False).end()
    result.assert_same_as(undisturbed(2))
    assert result.recoveries == from_memory(1)


def test_resize_while_running_keeps_samples_and_losses(tmp_path: Path, undisturbed: Undisturbed) -> None:
    exact, often = {"plain": True}, {"log_every_n_steps": 1}
    running = start(tmp_path, 2, options=exact | SLOW, **often)
    for ranks, after in ((3, 3), (1, 6)):
        running.wait_for_step(after)
        running.resize(ranks)
        running.wait_for_world(ranks)
    running.hurry()
    result, reference = running.end(), undisturbed(2, exact, **often)
    assert result.code == 0, result.shown
    assert str(result.ledger) == str(reference.ledger)
    assert [cause for cause, _ in causes(result)] == ["resize", "resize"]
    assert {lost for _, lost in result.recoveries} == {0}
    assert {event["global_batch"] for event in result.events_of("RunStarted")} == {12}
    assert result.losses == pytest.approx(reference.losses, rel=1e-6)


def test_resize_under_bitwise_keeps_the_same_bytes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Also of a run that is stopped when its number of ranks is to change, and of one that is while it changes."""
    settings = {"reproducible": "bitwise", "virtual_ranks": 4}
    first = 0
    for moment in ("asked", "between two worlds"):
        running = start(tmp_path, 2, options=SLOW, log_every_n_steps=1, resume_from_checkpoint=bool(first), **settings)
        running.wait_for_step(first + 2)
        running.resize(4)
        if moment == "between two worlds":
            running.wait_for("AttemptEnded")
        os.kill(running.process.pid, signal.SIGTERM)
        first = assert_saved(running, after=first)
    running = start(tmp_path, 2, options=SLOW, log_every_n_steps=1, resume_from_checkpoint=True, **settings)
    for ranks, after in ((4, 2), (1, 4)):
        running.wait_for_step(first + after)
        running.resize(ranks)
        running.wait_for_world(ranks)
    running.hurry()
    running.end().assert_same_as(undisturbed(2, **settings))


PLAIN = """
import os, signal, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1 and not os.path.exists("killed"):
    open("killed", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
print("done in", os.environ["DISTRIBUTED_ATTEMPT"], flush=True)
dist.destroy_process_group()
"""


@pytest.mark.soak  # decided in test_launch_supervisor.py without processes
def test_rank_of_plain_script_that_exits_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN.replace("os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"))
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "exit code 0 while others still worked" in done.stderr


@pytest.mark.parametrize("restarts", [None, 2])
def test_script_without_trainer_restarts_only_when_asked(tmp_path: Path, restarts: int | None) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    command = [*launching_python(), "-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", "2"]
    more = [] if restarts is None else [f"max_restarts={restarts}"]
    done = subprocess.run(
        [*command, "--run-dir", "run", *more],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    shown = done.stdout + done.stderr
    if restarts is None:
        assert done.returncode == 1
        assert "SIGKILL" in shown
        assert "done in" not in shown
    else:
        assert done.returncode == 0, shown
        assert sorted(line for line in shown.splitlines() if "done in" in line) == ["[r0] done in 1", "[r1] done in 1"]


def test_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    running = start(tmp_path, 2, fault("training", "hang", rank=0, step=2))
    wait_until(lambda: (tmp_path / "fault-0").exists(), "a rank hangs")
    for _ in range(2):
        os.kill(running.process.pid, signal.SIGTERM)
        wait_until(lambda: "again" in output(running) or running.process.poll() is not None, "it says what it does")
    assert running.end().code == 143


def output(running: Any) -> str:
    return os.pread(running._output.fileno(), 1 << 20, 0).decode()
