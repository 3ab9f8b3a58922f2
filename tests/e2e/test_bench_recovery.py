"""`distributed bench recovery` in small: real kills, starts and stuck ranks on both sides; no seconds here."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from distributed.bench.recovery.runs import SIDES, BenchRun, TimedStep, find_recovery
from distributed.core.errors import LaunchError

pytestmark = [
    pytest.mark.soak,
    pytest.mark.usefixtures("own_warm_parents"),
]  # minutes of real trainings; test_bench_collectives.py is the tiny real one

COMMAND = [sys.executable, "-m", "distributed.cli", "bench", "recovery"]


def test_bench_recovery_measures_both_sides(tmp_path: Path) -> None:
    target = tmp_path / "recovery.json"
    command = [*COMMAND, "--kills", "2", "--starts", "1", "--stalls", "1", "--steps", "20", "--json", str(target)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    assert [row["side"] for row in record["rows"]] == list(SIDES)
    for row in record["rows"]:
        assert row["kills"] == 2
        assert row["recovered"] == len(row["seconds"])
        assert all(seconds > 0 for seconds in row["seconds"])
        assert row["lost_steps"] >= 0
        assert row["side"] in ended.stdout
    assert record["rows"][0]["recovered"] == 2, "ours survives every kill"
    for side in SIDES:
        assert len(record["starts_s"][side]) == 1
        assert record["supervision"][side]["steps"] >= 20
    assert set(record["supervision"]["ours"]["cpu_s"]) == {"launcher", "warm parent"}
    assert set(record["in_rank_us"]) == {"heartbeat", "seeds", "pace", "stop"}
    assert all(math.isfinite(cost) for cost in record["in_rank_us"].values())
    too_few = next(bar for bar in record["bars"] if bar["name"].startswith("recoveries"))
    assert not too_few["passed"], "two kills show little, and that is said"
    assert "MISS" in ended.stdout
    assert record["versions"]["torch"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_bench_recovery_leaves_no_process_or_file(tmp_path: Path, number: signal.Signals) -> None:
    """In the middle of a recovery, with runs of both sides alive."""
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    command = [*COMMAND, "--kills", "50", "--starts", "1"]
    bench = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("bench-*/killed-*/steps-*"))) < 4:
            assert bench.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = psutil.Process(bench.pid).children(recursive=True)
        assert len(started) >= 2 * 3, "a launcher and two ranks a side"
        bench.send_signal(number)
        assert bench.wait(timeout=30) == 130
    finally:
        left = psutil.Process(bench.pid).children(recursive=True) if bench.poll() is None else []
        bench.kill()
        bench.wait()
        for process in left:  # of a test that fails: they would train for ever
            with suppress(psutil.NoSuchProcess):
                process.kill()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    assert not list(tmp_path.glob("bench-*")), "nor are its files"


def test_step_of_the_old_world_after_kill_is_no_recovery() -> None:
    """Rank 1 is killed at 10; rank 0 still ends step 3, which both take again after a state of step 2."""
    killed = [TimedStep(1, 1, 21), TimedStep(5, 2, 21)]
    survivor = [TimedStep(1, 1, 20), TimedStep(5, 2, 20), TimedStep(11, 3, 20)]
    assert find_recovery([survivor, killed], rank=1, pid=21, killed_ns=10) is None
    again = [TimedStep(500, 3, 22), TimedStep(600, 4, 22)]
    assert find_recovery([survivor, [*killed, *again]], rank=1, pid=21, killed_ns=10) is None, "it has not come back"
    back = [TimedStep(510, 3, 20), TimedStep(610, 4, 20)]
    found = find_recovery([[*survivor, *back], [*killed, *again]], rank=1, pid=21, killed_ns=10)
    assert found is not None
    assert found.seconds == pytest.approx(500e-9)


def test_run_that_cannot_start_raises_with_its_output(tmp_path: Path) -> None:
    with BenchRun("ours", 2, str(tmp_path / "x"), settings=["no_such_setting=1"]) as run:
        with pytest.raises(LaunchError, match="no_such_setting"):
            run.first_step_s()
