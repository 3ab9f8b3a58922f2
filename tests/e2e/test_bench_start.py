"""The suite's `start` and `tuning` in small: real commands, real searches; no seconds here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.suite.start.benchmark import find_engines, time_start
from benchmarks.suite.tuning.benchmark import time_search
from benchmarks.suite.twins import starter
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError, LaunchError

pytestmark = pytest.mark.soak  # minutes of real trainings; test_bench_collectives.py is the tiny real one


def test_bench_start_times_engine_beside_hand_written_launch(tmp_path: Path) -> None:
    target = tmp_path / "start.json"
    command = [sys.executable, "-m", "benchmarks.suite", "start", "--only", "fsdp", "--repeats", "1"]
    ended = subprocess.run([*command, "--json", str(target)], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    assert [(row["name"], row["peer"]) for row in record["rows"]] == [("fsdp", "torchrun"), ("torchrun", "")]
    for row in record["rows"]:
        assert 0 < row["first_step_s"] <= row["whole_s"]
        assert row["name"] in ended.stdout
    ours, by_hand = record["rows"]
    assert ours["of_peer"] == pytest.approx(ours["first_step_s"] / by_hand["first_step_s"], rel=0.01)
    assert by_hand["of_peer"] is None


def test_every_engine_has_both_start_benchmark_scripts() -> None:
    folder = Path(sys.modules["benchmarks.suite.start.benchmark"].__file__ or "").parent
    for name, engine in ENGINES.entries.items():
        assert (folder / f"ours_{engine.models}.py").exists()
        assert (folder / f"by_hand_{starter(name)}.py").exists()


def test_engine_not_installed_is_skipped_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES.entries, "ray", replace(ENGINES.entries["ray"], needs="no_such_module"))
    engines, missing = find_engines()
    assert "ray" not in engines
    assert "pytorch-ddp" in engines
    assert missing["ray"] == 'pip install "distributed-training[ray]"'


def test_unknown_engine_error_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="horovod"):
        find_engines(["horovot"])


def test_failed_start_raises_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LaunchError, match="broken installation"):
        time_start("torchrun", 2, str(tmp_path / "run"), by_hand=True)


def test_search_time_is_compared_with_sum_of_its_trials(tmp_path: Path) -> None:
    found = time_search("ours", str(tmp_path / "search"), steps=20, trials=3, parallel=2)
    assert found.trials_s > 0
    assert found.wall_s >= found.trials_s / 2, "no search is quicker than its trials"
    assert found.ratio == pytest.approx(found.wall_s / (found.trials_s / 2))
