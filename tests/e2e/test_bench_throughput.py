"""The suite's `throughput` in small: two real processes a contender, interleaved on tiny models; no seconds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite.throughput import CONTENDERS
from distributed.bench.throughput.benchmark import ThroughputRequest, choose_workloads, measure_throughput
from distributed.bench.throughput.contenders import WITHOUT_PEERS, find_contenders
from distributed.bench.throughput.job import WorkloadJob
from distributed.bench.throughput.ours import looks
from distributed.bench.throughput.results import ThroughputRow, WorkloadResult, compare
from distributed.core.errors import ConfigError
from distributed.core.registry import load_target

pytestmark = pytest.mark.soak  # minutes of real trainings; test_bench_collectives.py is the tiny real one

Bench = tuple[dict[str, Any], str, str, str]  # figures, picture, stdout, stderr
# Ray's own cluster takes longer to start than all others; the suite has it where it is installed.
NAMES = ["best-bare", "ours", "bare", "lightning", "fabric", "accelerate"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("throughput")
    command = [sys.executable, "-m", "benchmarks.suite", "throughput", "--tiny", "--workload", "mlp"]
    command += ["--steps", "5", "--rounds", "1", "--json", str(folder / "t.json"), "--picture", str(folder / "t.svg")]
    command += [word for name in NAMES for word in ("--only", name)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "t.json").read_text()), (folder / "t.svg").read_text(), ended.stdout, ended.stderr


def test_bench_throughput_reports_every_contender(bench: Bench) -> None:
    record, _, shown, _ = bench
    (result,) = record["workloads"]
    rows = {row["contender"]: row for row in result["rows"]}
    assert set(rows) == set(NAMES)
    best = rows["best-bare"]["units_per_second"]
    for name, row in rows.items():
        assert len(row["rounds"]) == 1
        assert row["low"] <= row["units_per_second"] <= row["high"]
        assert row["ratio"] == pytest.approx(row["units_per_second"] / best)
        assert row["peak_gib"] > 0
        assert name in shown
    assert record["machine"]["cores"] >= 1
    peers = {"lightning", "fabric", "accelerate"}
    assert set(result["ours_over_peers"]) == peers


def test_all_contenders_reach_the_same_loss(bench: Bench) -> None:
    (result,) = bench[0]["workloads"]
    losses = {row["contender"]: row["loss"] for row in result["rows"]}
    assert all(math.isfinite(loss) and loss < result["start_loss"] for loss in losses.values()), losses
    assert result["losses_agree"], losses


def test_bench_log_names_contender_of_each_round(bench: Bench) -> None:
    assert all(f"mlp: rehearsing {name}" in bench[3] for name in NAMES)
    assert all(f"mlp: round 1 of 1: {name}" in bench[3] for name in NAMES)


def test_results_are_yielded_after_each_contender() -> None:
    request = ThroughputRequest(("mlp",), "cpu", "fp32", processes=1, rounds=1, steps=5, tiny=True)
    told: list[str] = []
    found = measure_throughput(request, find_contenders(["bare"], "cpu"), lambda text, done, in_all: told.append(text))
    try:
        (first,) = next(found).results
        assert [row.contender for row in first.rows] == ["bare"]  # who is asked for comes first
        assert told == ["starting", "mlp: rehearsing bare"]
        assert math.isfinite(first.start_loss)
        (second,) = next(found).results
        assert {row.contender for row in second.rows} == {"best-bare", "bare"}
    finally:
        found.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "precision"), [("gpt2-124m", "bf16"), ("mlp", "fp32"), ("convnet", "fp32")])
def test_ours_and_hand_written_loops_have_bitwise_equal_loss(name: str, precision: str, tmp_path: Path) -> None:
    losses = {}
    for contender in ("best-bare", "bare", "ours"):
        job = WorkloadJob(
            name, 0, 1, 10, 10, str(tmp_path / contender), torch.device("cpu"), precision, 10, False, {}, tiny=True
        )
        losses[contender] = job.final_loss(load_target(WITHOUT_PEERS[contender].target)(job))
        assert losses[contender] < job.final_loss(job.make_model())
    assert len(set(losses.values())) == 1, losses


def test_throughput_chart_has_a_bar_for_each_contender(bench: Bench) -> None:
    drawn = ET.fromstring(bench[1])
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert set(NAMES) <= texts


def test_losses_agree_is_false_for_a_deviating_contender() -> None:
    row = ThroughputRow(
        "bare",
        units_per_second=10.0,
        low=9.0,
        high=11.0,
        step_ms=1.0,
        ratio=1.0,
        part_of_peak=None,
        peak_gib=0.1,
        loss=1.0,
        rounds=(10.0,),
    )
    rows = (row, replace(row, contender="ours"), replace(row, contender="fabric", loss=2.0))
    result = WorkloadResult(
        "mlp", describes="", unit="samples", batch=8, steps=5, warm=5, rounds=1, start_loss=2.3, rows=rows, missing={}
    )
    assert not result.losses_agree
    assert replace(result, rows=rows[:2]).losses_agree


def test_peer_ratio_is_that_of_the_reported_medians() -> None:
    row = ThroughputRow(
        "ours",
        units_per_second=10.0,
        low=9.0,
        high=11.0,
        step_ms=1.0,
        ratio=1.0,
        part_of_peak=None,
        peak_gib=0.1,
        loss=1.0,
        rounds=(1.0, 10.0, 100.0),
    )
    peer = replace(row, contender="fabric", units_per_second=20.0, rounds=(0.5, 20.0, 21.0))
    result = WorkloadResult(
        "mlp",
        describes="",
        unit="samples",
        batch=8,
        steps=5,
        warm=5,
        rounds=3,
        start_loss=2.3,
        rows=(row, peer, replace(row, contender="bare")),
        missing={},
    )
    assert result.ours_over_peers["fabric"].ratio == 0.5
    assert result.reference == "bare"
    assert replace(result, rows=(row, peer)).reference == "ours"


def test_rates_within_their_spread_have_no_winner() -> None:
    ours = ThroughputRow(
        "ours",
        units_per_second=10.2,
        low=9.0,
        high=11.0,
        step_ms=1.0,
        ratio=1.0,
        part_of_peak=None,
        peak_gib=0.1,
        loss=1.0,
        rounds=(9.0, 10.2, 11.0),
    )
    peer = replace(ours, contender="fabric", units_per_second=10.0, rounds=(9.2, 10.0, 10.8))
    assert compare(ours, peer).verdict == "not told apart"
    far = replace(peer, units_per_second=5.0, rounds=(4.9, 5.0, 5.1))
    assert compare(ours, far).verdict == "faster"
    assert compare(far, ours).verdict == "slower"
    assert compare(replace(ours, rounds=(10.2,)), replace(far, rounds=(5.0,))).verdict == "by one round"


def test_unknown_names_and_too_large_cpu_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="fabric"):
        find_contenders(["fabrik"], "cpu", known=CONTENDERS)
    with pytest.raises(ConfigError, match="mlp"):
        choose_workloads(["mlpp"], "cpu", False)
    with pytest.raises(ConfigError, match="bert-large"):
        choose_workloads(["bert-large"], "cpu", False)


def test_contenders_of_another_device_are_skipped_with_reason() -> None:
    on_cpu, on_gpu = (find_contenders(None, device, known=CONTENDERS) for device in ("cpu", "cuda"))
    assert "GPU" in on_cpu.missing["floor"]
    assert "CPU" in on_gpu.missing["ray"]
    assert "floor" in on_gpu.of("mlp", "bf16")
    assert "floor" not in on_gpu.of("dlrm", "bf16")
    assert "ours-fp8" in on_gpu.of("gpt-1.3b", "bf16")
    assert "ours-free" not in find_contenders(None, "cuda", free_speed=False).names
    assert set(on_cpu.names) | set(on_cpu.missing) == set(CONTENDERS)


def test_compiled_workloads_are_compiled_for_all_but_bare() -> None:
    assert CONTENDERS["lightning"].is_compiled("gpt2-124m", "cuda")
    assert not CONTENDERS["bare"].is_compiled("gpt2-124m", "cuda")
    assert not CONTENDERS["lightning"].is_compiled("mlp", "cuda")
    assert not CONTENDERS["lightning"].is_compiled("gpt2-124m", "cpu")


def test_our_step_times_are_read_from_step_events(tmp_path: Path) -> None:
    kinds = [("EpochStarted", 0, 1.0), ("StepEnded", 5, 2.0), ("StepEnded", 10, 4.5), ("EpochEnded", 10, 9.0)]
    lines = [json.dumps({"event": kind, "step": step, "time": time}) for kind, step, time in kinds]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert looks(tmp_path / "events.jsonl", 5, 10) == [2.0, 4.5]


def test_package_refuses_peers_naming_the_suites_command() -> None:
    with pytest.raises(ConfigError, match=r"benchmarks\.suite throughput --only lightning"):
        find_contenders(["lightning"], "cpu")
    assert set(CONTENDERS) - set(WITHOUT_PEERS) == {"lightning", "fabric", "accelerate", "ray"}
