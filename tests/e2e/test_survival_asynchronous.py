"""Asynchronous runs that are hurt: a worker is lost and the server goes on, the server is lost and all resume.

With max_staleness=0 the bytes are those of a run that was never hurt; beyond it, every sample still counts once.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.survival import STEPS, Result, Undisturbed, fault, from_memory, start

ASYNCHRONOUS: dict[str, Any] = {"synchronization": "asynchronous", "sync_batchnorm": False}
APART: dict[str, Any] = ASYNCHRONOUS | {"max_staleness": 2, "log_every_n_steps": 6}
IN_STEP: dict[str, Any] = ASYNCHRONOUS | {"max_staleness": 0}


def test_killed_worker_resumes_from_the_servers_memory(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(
        tmp_path,
        2,
        fault("training", rank=1, step=4),
        fault("evaluation", rank=1, step=9),
        fault("training", rank=1, step=23),
        **IN_STEP,
    ).end()
    result.assert_same_as(undisturbed(2, **IN_STEP))
    assert result.recoveries == from_memory(0, 0, 0)


def test_killed_server_resumes_from_the_checkpoint(tmp_path: Path, undisturbed: Undisturbed) -> None:
    result = start(tmp_path, 2, fault("training", rank=0, step=17), **IN_STEP).end()
    result.assert_same_as(undisturbed(2, **IN_STEP))
    ((source, _),) = result.recoveries
    assert source in ("step-000010", "step-000015")


def processes_of(result: Result) -> list[str]:
    """The ranks of all processes of a run, in order: each has a log."""
    return sorted(path.stem for path in result.run_dir.glob("attempts/*/rank-*.log"))


def test_ranks_apart_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    """Two workers are killed in turn, one hangs; the server and who else is left go on in their processes."""
    result = start(
        tmp_path,
        3,
        fault("training", rank=1, step=5),
        fault("training", rank=2, step=13),
        fault("training", "hang", rank=1, step=21),
        hang_timeout_s=2,
        **APART,
    ).end()
    assert result.code == 0, result.shown
    assert result.ledger.is_exact
    assert [source for source, _ in result.recoveries] == ["memory of rank 0"] * 3
    assert processes_of(result) == ["rank-0", "rank-1", "rank-1", "rank-1", "rank-2", "rank-2"]
    (hung,) = result.events_of("RankStalled")
    assert hung["rank"] == 1


@pytest.mark.soak
def test_lost_server_of_ranks_apart_costs_the_steps_since_a_save(tmp_path: Path) -> None:
    result = start(tmp_path, 3, fault("training", rank=0, step=17), **APART).end()
    assert result.code == 0, result.shown
    assert result.ledger.is_exact
    assert result.recoveries[-1][0] in ("step-000010", "step-000015")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(APART | {"max_staleness": 4}, id="apart"),
        pytest.param({"sync_batchnorm": False}, id="dense", marks=pytest.mark.soak),
    ],
)
def test_stopped_run_of_ranks_apart_resumes_on_two(settings: dict[str, Any], tmp_path: Path) -> None:
    """What a signal ends is saved at a step that all have come to; dense training goes on with it too."""
    running = start(tmp_path, 3, options={"pace": 0.1}, **APART)
    running.wait_for_step(5)
    os.kill(running.process.pid, signal.SIGTERM)
    stopped = running.end()
    assert stopped.code == 143, stopped.shown
    (end,) = stopped.events_of("RunEnded")
    assert end["status"] == "interrupted"
    assert end["step"] < STEPS
    resumed = start(tmp_path, 2, resume_from_checkpoint=True, **settings).end()
    assert resumed.code == 0, resumed.shown
    assert resumed.ledger.is_exact
    assert resumed.events_of("RunStarted")[-1]["first_step"] == end["step"]
    told = resumed.events_of("ResumeCompared")[-1]["text"]
    assert ("the timing of the ranks" in told) == ("max_staleness" in settings), told
