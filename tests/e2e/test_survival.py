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
    Undisturbed,
    fault,
    from_memory,
    start,
    start_alone,
    wait_until,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(lambda: tmp_path_factory.mktemp("undisturbed"))


def causes(result: Result) -> list[tuple[str, int]]:
    return [(event["cause"], event["rank"]) for event in result.told("AttemptEnded")]


def test_each_of_two_ranks_is_killed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("training", rank=1, step=1),
        fault("training", rank=0, step=20),
        fault("training", rank=1, step=3 * PER_EPOCH),
        fault("training", rank=0, step=4 * PER_EPOCH),
        fault("evaluation", rank=0, step=4 * PER_EPOCH),
        fault("evaluation", rank=1, step=5 * PER_EPOCH),
        fault("training", rank=1, step=STEPS),
    ).end()
    result.assert_same_as(undisturbed(2))
    assert causes(result) == [("machine", rank) for rank in (1, 0, 1, 0, 0, 1, 1)]
    assert result.recoveries == from_memory(0, 1, 0, 1, 1, 0, 0)
    assert "end of the script" in result.shown


def test_each_of_three_ranks_is_killed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        3,
        fault("training", rank=0, step=1),
        fault("training", rank=1, step=20),
        fault("training", rank=2, step=3 * PER_EPOCH),
        fault("evaluation", rank=1, step=4 * PER_EPOCH),
        fault("training", rank=1, step=60),  # and another one before a step is made
        fault("training", rank=0, step=60, attempt=5),
    ).end()
    result.assert_same_as(undisturbed(3))
    assert {lost for _, lost in result.recoveries} == {0}
    assert all(source.startswith("memory of rank") for source, _ in result.recoveries)
    assert len(result.told("AttemptEnded")) == 6


def test_a_rank_is_killed_while_it_writes_a_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("copied", rank=1),
        fault("chunks written", rank=1, attempt=1),
        fault("part written", rank=0, attempt=2),
        fault("before the manifest", rank=0, attempt=3),
        fault("manifest written", rank=0, attempt=4),
    ).end()
    result.assert_same_as(undisturbed(2))
    assert result.recoveries == from_memory(0, 0, 1, 1, 1)


def test_all_ranks_are_killed_at_once(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("training", "kill all", rank=0, step=3),  # before there is a checkpoint
        fault("training", "kill all", rank=1, step=33),
        fault("training", rank=0, step=54),  # one after the other, with no step between
        fault("training", rank=1, step=54, attempt=3),
    ).end()
    result.assert_same_as(undisturbed(2))
    sources = [source for source, _ in result.recoveries]
    assert sources[0] == "the beginning"
    assert sources[1] in ("step-000025", "step-000030")  # the newest one may not have been published yet
    # The one that replaced the first may have begun, and then holds the state.
    assert sources[2] in ("memory of rank 0", "step-000045", "step-000050")
    assert [bool(lost) for _, lost in result.recoveries[:2]] == [True, True]


def test_a_rank_is_killed_while_the_ranks_meet(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("meeting", rank=1),
        fault("training", rank=1, step=20),
        fault("start", rank=1, attempt=2),  # the one that takes its place, before it comes to the loop
        fault("training", rank=0, step=40),
        fault("before the handover", rank=0, attempt=4),
        fault("training", rank=1, step=60),
        fault("taking over", rank=1, attempt=6),
    ).end()
    result.assert_same_as(undisturbed(2))
    assert result.recoveries == [("the beginning", 0), *from_memory(0, 1, 0)]
    assert len(result.told("AttemptEnded")) == 7


def test_the_parent_of_all_ranks_is_killed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(tmp_path, 2, fault("training", "kill the parent", rank=1, step=33)).end()
    result.assert_same_as(undisturbed(2))
    assert [event["cause"] for event in result.told("AttemptEnded")] == ["machine"]
    assert result.recoveries[0][0] in ("step-000025", "step-000030")


def test_the_launcher_is_killed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    running = start(tmp_path, 2, options={"pace": 0.02})
    running.wait_for_step(30)
    running.process.kill()
    assert running.end().code == -signal.SIGKILL  # and nothing is left
    result = start(tmp_path, 2, options={"pace": 0.0}, resume_from_checkpoint=True).end()
    result.assert_same_as(undisturbed(2))
    assert 0 < result.told("RunStarted")[-1]["first_step"] <= 60


def test_a_model_with_buffers_of_its_own(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Only rank 0 has those that count, which the run must be told."""
    options = {"own_buffer": True, "settings": {"check_replicas": "parameters"}}
    faults = fault("training", rank=1, step=20), fault("training", rank=0, step=33)
    result = start(tmp_path, 2, *faults, options=options).end()
    result.assert_same_as(undisturbed(2, options))
    assert result.recoveries[0] == ("memory of rank 0", 0)
    assert result.recoveries[1][0] in ("step-000025", "step-000030")


def test_ranks_that_hang(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("training", "hang", rank=1, step=10),
        fault("training", "extra barrier", rank=0, step=20),
        fault("training", "stop", rank=0, step=33),
        fault("reading", "hang", rank=1, step=4),  # a sample
        hang_timeout_s=2,
    ).end()
    result.assert_same_as(undisturbed(2))
    stalls = result.told("RankStalled")
    assert causes(result) == [("hang", event["rank"]) for event in stalls]
    first, barrier, stopped = (next(e for e in stalls if e["step"] == step) for step in (9, 19, 32))
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
    assert result.recoveries == from_memory(*(1 - event["rank"] for event in result.told("RankStalled")))


def test_a_data_loader_worker_that_hangs(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"workers": 1}
    hang, kill = fault("reading", "hang", step=7), fault("training", rank=0, step=30)
    result = start(tmp_path, 2, hang, kill, options=options, hang_timeout_s=2).end()
    result.assert_same_as(undisturbed(2, options))
    (stall,) = result.told("RankStalled")
    assert "hang_in_user_code" in stall["where"]
    assert "worker" in stall["where"]
    assert stall["waiting"] == [1 - stall["rank"]]
    assert {lost for _, lost in result.recoveries} == {0}


def test_what_is_slow_for_a_reason_does_not_hang(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("training", "slow", rank=1, step=1),  # as when it compiles
        fault("evaluation", "slow", rank=0, step=PER_EPOCH),
        fault("copied", "slow", rank=1),
        fault("part written", "slow", rank=0),
        hang_timeout_s=1.5,
    ).end()
    result.assert_same_as(undisturbed(2))
    assert not result.told("RankStalled")
    assert not result.told("AttemptEnded")


def test_errors_and_memory_that_pass(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("training", "raise", rank=1, step=20),
        fault("training", "no memory", rank=0, step=33),
        fault("training", "killed for memory", rank=0, step=54),
    ).end()
    result.assert_same_as(undisturbed(2))
    assert causes(result) == [("code", 1), ("code", 0), ("machine", 0)]
    assert result.recoveries == from_memory(0, 1, 1)
    assert "Traceback" not in result.shown


def test_the_same_error_again_ends_the_run(tmp_path: Path) -> None:
    result = start(tmp_path, 2, fault("training", "raise", rank=1, step=20, always=True)).end()
    assert result.code == 1
    assert len(result.told("AttemptEnded")) == 1
    assert [event["rank"] for event in result.told("RankFailed")] == [1]
    assert result.shown.count("Traceback (most recent call last)") == 1
    assert "in suffer" in result.shown


def test_a_rank_that_exits_with_code_0_in_mid_run_is_named(tmp_path: Path) -> None:
    result = start(tmp_path, 2, fault("training", "exit well", rank=1, step=20, always=True)).end()
    assert result.code == 1
    assert [event["cause"] for event in result.told("AttemptEnded")] == ["code"]
    assert [
        (event["rank"], "exit code 0 after step 19" in event["message"]) for event in result.told("RankFailed")
    ] == [(1, True)]
    assert "rank 1" in result.shown


@pytest.mark.parametrize(
    ("what", "code"), [({"place": "training", "step": 1}, 1), ({"place": "start"}, 1), ({"nan_at": 20}, 6)]
)
def test_errors_that_end_a_run_at_once(tmp_path: Path, what: dict[str, Any], code: int) -> None:
    faults = [] if "nan_at" in what else [fault(what="raise", rank=1, **what)]
    result = start(tmp_path, 2, *faults, options=what if "nan_at" in what else None).end()
    assert result.code == code
    assert not result.told("AttemptEnded")
    assert len(result.told("RankFailed")) == 1
    assert result.shown.count("Traceback (most recent call last)") == 1


def test_fit_in_a_plain_script(tmp_path: Path, undisturbed: Undisturbed) -> None:
    options = {"workers": 1}
    faults = fault("training", rank=0, step=20), fault("training", rank=1, step=40), fault("training", "raise", step=50)
    result = start_alone(tmp_path, 2, *faults, options=options).end()
    result.assert_same_as(undisturbed(2, options))
    assert {lost for _, lost in result.recoveries} == {0}
    assert "end of the script" in result.shown


def test_half_precision_accumulation_and_no_warm_start(tmp_path: Path, undisturbed: Undisturbed) -> None:
    settings = {"mixed_precision": "fp16", "gradient_accumulation_steps": 2, "warm_start": False}
    faults = (
        fault("training", rank=0, step=41),
        fault("training", rank=1, step=82),
    )  # in the first micro-batch, the second
    result = start(tmp_path, 2, *faults, **settings).end()
    result.assert_same_as(undisturbed(2, **settings))
    assert result.recoveries == from_memory(1, 0)


def test_another_number_of_ranks_while_it_runs(tmp_path: Path, undisturbed: Undisturbed) -> None:
    exact, often = {"plain": True}, {"log_every_n_steps": 1}
    running = start(tmp_path, 2, options=exact | {"pace": 0.05}, **often)
    for ranks, after in ((3, 10), (1, 30)):
        running.wait_for_step(after)
        running.resize(ranks)
        running.wait_for("Recovered", lambda event, ranks=ranks: event["world_size"] == ranks)  # type: ignore[misc]
    result, reference = running.end(), undisturbed(2, exact, **often)
    assert result.code == 0, result.shown
    assert str(result.ledger) == str(reference.ledger)
    assert [cause for cause, _ in causes(result)] == ["resize", "resize"]
    assert {lost for _, lost in result.recoveries} == {0}
    assert {event["global_batch"] for event in result.told("RunStarted")} == {12}
    assert result.losses == pytest.approx(reference.losses, rel=1e-6)


def test_another_number_of_ranks_with_the_same_bytes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    settings = {"reproducible": "bitwise", "virtual_ranks": 4}
    running = start(tmp_path, 2, options={"pace": 0.02}, **settings)
    for ranks, after in ((4, 10), (1, 30)):
        running.wait_for_step(after)
        running.resize(ranks)
        running.wait_for("Recovered", lambda event, ranks=ranks: event["world_size"] == ranks)  # type: ignore[misc]
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


def test_a_rank_of_a_plain_script_that_exits_before_the_others_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN.replace("os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"))
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "exit code 0 while others still worked" in done.stderr


@pytest.mark.parametrize("restarts", [None, 2])
def test_a_script_without_a_trainer(tmp_path: Path, restarts: int | None) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--num-gpus", "2"]
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


@pytest.mark.parametrize(("number", "setting"), [(signal.SIGTERM, None), (signal.SIGUSR1, 75)])
def test_a_run_that_is_preempted_goes_on(
    tmp_path: Path, undisturbed: Undisturbed, number: int, setting: int | None
) -> None:
    more = {} if setting is None else {"requeue_exit_code": setting}
    running = start(tmp_path, 2, options={"pace": 0.02}, **more)
    running.wait_for_step(20)
    os.kill(running.process.pid, number)
    stopped = running.end()
    assert stopped.code == (setting or 143), stopped.shown
    ended = stopped.told("RunEnded")[-1]
    assert ended["status"] == "interrupted"
    assert ended["model_path"].endswith(f"step-{ended['step']:06d}")
    result = start(tmp_path, 2, resume_from_checkpoint=True).end()
    result.assert_same_as(undisturbed(2))
    assert result.told("RunStarted")[-1]["first_step"] == ended["step"]


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    running = start(tmp_path, 2, fault("training", "hang", rank=0, step=20))
    wait_until(lambda: (tmp_path / "fault-0").exists(), "a rank hangs")
    for _ in range(2):
        os.kill(running.process.pid, signal.SIGTERM)
        wait_until(lambda: "again" in output(running) or running.process.poll() is not None, "it says what it does")
    assert running.end().code == 143


def output(running: Any) -> str:
    return os.pread(running._output.fileno(), 1 << 20, 0).decode()
