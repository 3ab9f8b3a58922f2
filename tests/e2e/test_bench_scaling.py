"""`distributed bench scaling` in small: real processes through Trainer.fit, a row for each size; no seconds here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.bench.scaling.benchmark import BATCH, measure_scaling
from distributed.core.errors import RankFailedError

pytestmark = pytest.mark.soak  # minutes of real trainings; test_bench_collectives.py is the tiny real one


def test_bench_scaling_reports_every_world_size(tmp_path: Path) -> None:
    target = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "distributed.cli", "bench", "scaling", "--max-processes", "2"]
    command += ["--steps", "1", "--repeats", "1", "--json", str(target)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    assert [row["processes"] for row in record["rows"]] == [1, 2]
    for row in record["rows"]:
        assert math.isfinite(row["samples_per_second"])
        assert row["samples_per_second"] > 0
        assert row["efficiency"] == pytest.approx(row["speed_up"] / row["processes"])
        assert f"{row['samples_per_second']:.0f}" in ended.stdout
    assert record["rows"][0]["speed_up"] == 1.0
    assert str(record["machine"]["cores"]) in ended.stdout


def test_strong_scaling_keeps_the_global_batch() -> None:
    found = measure_scaling(2, steps=1, repeats=1, strong=True, notify=lambda *_: None)
    assert [size.batch_per_device * size.processes for size in found.sizes] == [2 * BATCH, 2 * BATCH]


def test_bench_scaling_raises_when_training_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise RuntimeError('broken installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RankFailedError, match="broken installation"):
        measure_scaling(1, steps=1, repeats=1, strong=False, notify=lambda *_: None)
