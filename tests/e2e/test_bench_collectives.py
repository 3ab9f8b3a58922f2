"""`distributed bench collectives` in small: two real processes send to each other; no seconds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.bench.collectives.benchmark import OPERATIONS, bus_part
from distributed.bench.pictures import draw


def test_bench_collectives_reports_every_operation_and_size(tmp_path: Path) -> None:
    target, picture = tmp_path / "collectives.json", tmp_path / "collectives.svg"
    command = [sys.executable, "-m", "distributed.cli", "bench", "collectives", "--processes", "2"]
    command += ["--largest", "0.016", "--rounds", "2", "--json", str(target), "--picture", str(picture)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    measured = {(row["operation"], row["size_bytes"]) for row in record["rows"]}
    assert measured == {(operation, size) for operation in OPERATIONS for size in (1024, 4096, 16384)}
    for row in record["rows"]:
        assert math.isfinite(row["latency_us"])
        assert row["low_us"] <= row["latency_us"] <= row["high_us"]
        expected = row["size_bytes"] * bus_part(row["operation"], 2) / row["latency_us"] / 1e3
        assert row["bus_gb_s"] == pytest.approx(expected, abs=1e-5)
    assert all(operation in ended.stdout for operation in OPERATIONS)
    assert record["settings"] == {"backend": "gloo", "processes": 2, "rounds": 2}
    assert picture.read_bytes() == draw(record)
    assert str(picture) in ended.stdout
