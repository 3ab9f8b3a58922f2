"""`distributed bench checkpoint --processes 2` in small: two ranks save a model that they hold in parts; no seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.bench.pictures import draw
from tests.conftest import clean_environ, fresh_cli


def test_sharded_save_stall_is_compared_rank_by_rank(tmp_path: Path) -> None:
    target, picture = tmp_path / "checkpoint.json", tmp_path / "checkpoint.svg"
    command = [sys.executable, "-m", "distributed.cli", "bench", "checkpoint", "--processes", "2"]
    command += ["--mib", "32", "--rounds", "2", "--json", str(target), "--picture", str(picture)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=clean_environ())
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["copy", "copy, memory kept", "save", "save, 5 % changed", "dcp.async_save"]
    assert record["settings"] == {"device": "cpu", "processes": 2, "strategy": "fsdp", "backend": "gloo"}
    assert record["stall_ratio"] == rows["save"]["stall_s"] / rows["copy"]["stall_s"]
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert record["largest_ratio_of_a_rank"] == max(rank["save_s"] / rank["copy_s"] for rank in record["ranks"])
    assert sum(rank["shard_mib"] for rank in record["ranks"]) == pytest.approx(record["state_mib"], abs=0.6)
    assert rows["save"]["written_mib"] == pytest.approx(record["state_mib"], abs=0.6), "every rank saved its shard"
    assert isinstance(record["manifest_later_s"], float)
    assert "rank 1" in ended.stdout
    assert picture.read_bytes() == draw(record)


def test_sharded_bench_without_gpu_is_refused(tmp_path: Path) -> None:
    words = ["bench", "checkpoint", "--processes", "2", "--device", "cuda"]
    ended = fresh_cli(tmp_path, *words, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 2
    assert "no GPU" in ended.stderr
    assert "Traceback" not in ended.stderr
