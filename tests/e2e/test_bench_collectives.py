"""`distributed bench collectives` in small: two real processes send to each other; no seconds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import profile_communication
from distributed.bench.collectives.benchmark import ALGORITHMS, MORE_OPERATIONS, OPERATIONS, bus_part
from distributed.bench.pictures import draw
from distributed.cli.bench import app
from distributed.core.errors import DistributedError
from distributed.testing import run_ranks


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distributed.cli", "bench", "collectives", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_bench_collectives_reports_every_operation_and_size(tmp_path: Path) -> None:
    target, picture = tmp_path / "collectives.json", tmp_path / "collectives.svg"
    files = ("--json", str(target), "--picture", str(picture))
    ended = run("--processes", "2", "--largest", "0.016", "--rounds", "2", *files)
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


def test_every_operation_and_algorithm_is_measured_and_right(tmp_path: Path) -> None:
    target = tmp_path / "all.json"
    options = ("-b", "12", "-e", "4K", "-f", "300", "-n", "2", "--rounds", "1", "--backend", "gloo")
    ended = run("--processes", "3", *options, "--operation", "all", "--algorithm", "all", "--json", str(target))
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    wanted = {(operation, "backend") for operation in (*OPERATIONS, *MORE_OPERATIONS)}
    wanted |= {("all-reduce", algorithm) for algorithm in ALGORITHMS}
    assert {(row["operation"], row["algorithm"]) for row in record["rows"]} == wanted
    assert {(row["size_bytes"], row["count"]) for row in record["rows"]} == {(12, 3), (3600, 900)}
    assert {row["wrong"] for row in record["rows"]} == {0}
    assert all(column in ended.stdout for column in ("count", "type", "redop", "algbw", "busbw", "#wrong"))


def test_pairs_are_a_matrix_of_all_ranks(tmp_path: Path) -> None:
    target, picture = tmp_path / "pairs.json", tmp_path / "pairs.svg"
    files = ("--json", str(target), "--picture", str(picture))
    ended = run("--pairs", "--processes", "3", "-n", "1", "--rounds", "1", *files)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(target.read_text())
    assert [row["ranks"] for row in record["rows"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(row["gb_s"] > 0 and row["latency_us"] > 0 for row in record["rows"])
    assert picture.read_bytes() == draw(record)


@pytest.mark.parametrize(
    "options",
    [
        ("--operation", "all-reduction"),
        ("--algorithm", "circle"),
        ("-b", "8 bytes"),
        ("-b", "2M", "-e", "1M"),
        ("-b", "4", "--processes", "2"),
        ("--largest", "1", "-e", "1M"),
        ("--backend", "mpi"),
    ],
)
def test_options_that_cannot_be_are_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(DistributedError):
        app(["collectives", *options], standalone_mode=False)


def profiled() -> list[tuple[int, float, float]]:
    return [tuple(row) for row in profile_communication((64, 1024))]


def test_communication_is_profiled_on_any_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_ranks(profiled, 2)
    assert found[0] == found[1], "the slowest rank counts, on all of them"
    capsys.readouterr()
    for size, seconds, rate in found[0]:
        assert rate == pytest.approx(size * 8 / seconds / 2**20)
    assert [rate for _, _, rate in profiled()] == [0, 0], "a single process sends nothing"
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["Size: 64", "Size: 1024"]
