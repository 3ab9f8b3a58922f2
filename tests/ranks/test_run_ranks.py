"""run_ranks: forked from a warm process or cold, a rank is a fresh world each time, and its end is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.core.errors import RankFailedError
from distributed.testing import run_ranks
from tests.conftest import clean_environ

WARM = pytest.mark.parametrize("warm", [True, False])


def leave_traces() -> tuple[int, Any, list[str]]:
    """The pid, what an earlier call left in this process, and what this one does."""
    import numpy
    import torch

    import distributed

    before = getattr(distributed, "left_by_a_test", None)
    distributed.left_by_a_test = os.environ.get("LEFT")  # type: ignore[attr-defined]
    return os.getppid(), before, [str(torch.rand(1).item()), str(numpy.random.rand())]


def test_warm_ranks_share_a_parent_and_nothing_else() -> None:
    (first, _, drawn), (_, _, other) = run_ranks(leave_traces, 2)
    (again, left, later), _ = run_ranks(leave_traces, 2)
    assert first == again, "the second world was forked from another process"
    assert left is None
    assert drawn[0] == other[0] == later[0], "torch's generator starts as in a fresh process"
    assert len({drawn[1], other[1], later[1]}) == 3, "numpy's does not repeat"


@WARM
def test_ranks_get_the_environment_of_each_call(warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in ("one", "two"):
        monkeypatch.setenv("OF_THIS_CALL", value)
        found.append(run_ranks(lambda: os.environ["OF_THIS_CALL"], 1, warm=warm))
    assert found == [["one"], ["two"]]


@WARM
def test_failed_rank_is_reported_and_next_world_runs(warm: bool) -> None:
    def fail_on_1() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("of rank one")

    with pytest.raises(RankFailedError, match=r"rank 1 .*ValueError: of rank one"):
        run_ranks(fail_on_1, 2, warm=warm)
    assert run_ranks(lambda: os.environ["RANK"], 2, warm=warm) == ["0", "1"]


@WARM
def test_killed_rank_ends_the_others(warm: bool, tmp_path: Path) -> None:
    def die_on_1(folder: str) -> None:
        Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RankFailedError, match=r"rank 1 .*SIGKILL"):
        run_ranks(die_on_1, 2, str(tmp_path), warm=warm)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_killed_parent_is_replaced() -> None:
    (parent, *_), _ = run_ranks(leave_traces, 2)
    process = psutil.Process(parent)
    process.kill()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    (other, *_), _ = run_ranks(leave_traces, 2)
    assert other != parent


def test_parent_ends_with_its_process() -> None:
    program = "import os; from distributed.testing import run_ranks; print(run_ranks(os.getppid, 1)[0])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environ(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not psutil.pid_exists(int(done.stdout))
