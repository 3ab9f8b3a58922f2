"""`python -m benchmarks.suite overhead` in small: real interleaved ranks of each installed contender; no seconds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.overhead import contenders
from benchmarks.suite.overhead.benchmark import measure_overhead
from benchmarks.suite.overhead.contenders import contenders_of, find_contenders
from distributed.core.errors import ConfigError, RankFailedError
from distributed.core.registry import Entry

pytestmark = pytest.mark.soak  # minutes of real trainings; test_bench_collectives.py is the tiny real one


def run_cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.suite", *words], capture_output=True, text=True, timeout=280
    )


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers_in(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_bench_overhead_measures_all_installed_contenders(tmp_path: Path) -> None:
    target = tmp_path / "overhead.json"
    ended = run_cli("overhead", "--steps", "50", "--rounds", "1", "--json", str(target))
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    rows = {row["contender"]: row for row in record["rows"]}
    installed = {
        name
        for name, entry in contenders_of("pytorch-ddp").entries.items()
        if not entry.needs or find_spec(entry.needs)
    }
    assert set(rows) == installed - {"bare"}
    assert {"ours", "bare-again"} <= set(rows)
    assert numbers_in(record)
    assert all(math.isfinite(number) for number in numbers_in(record))
    for row in rows.values():
        assert row["cpu_us"] > 0
        assert row["wall_us"] > 0
        assert row["contender"] in ended.stdout
    turns = [turn for turns in record["turns"].values() for turn in turns]
    assert all(len(turn["own"]) == len(turn["bare"]) == 2 for turn in turns), "a figure for each rank"
    assert record["versions"]["torch"]
    assert record["machine"]["cores"] >= 1


def test_bench_overhead_refuses_steps_with_uneven_log_lines() -> None:
    with pytest.raises(ConfigError, match="--steps 100"):
        measure_overhead(find_contenders(["ours"]), processes=1, steps=120, rounds=1, notify=lambda *_: None)


def test_unknown_contender_error_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="fabric"):
        find_contenders(["fabrik"])


def test_contender_not_installed_is_skipped_naming_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contenders._PEERS, "fabric", Entry("no.such:train", "no_such_module", "peers"))
    found = find_contenders()
    assert found.missing == {"fabric": "peers"}
    assert "fabric" not in found.names


def test_failed_benchmark_rank_raises_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender whose package breaks when it is imported in the ranks."""
    (tmp_path / "tensorboard.py").write_text("raise RuntimeError('broken installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RankFailedError) as caught:
        measure_overhead(find_contenders(["ours"]), processes=2, steps=50, rounds=1, notify=lambda *_: None)
    assert "broken installation" in caught.value.traceback
