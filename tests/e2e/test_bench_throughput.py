"""`distributed bench throughput` in small: two real processes a contender train tiny models by turns; no seconds."""

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

from distributed.bench.throughput import Row, Wish, WorkloadResult, choose_workloads, compare, measure_throughput
from distributed.bench.throughput_field import CONTENDERS, ORDER, find_field, is_compiled
from distributed.bench.throughput_ours import looks
from distributed.bench.throughput_work import WorkloadJob
from distributed.core.errors import ConfigError

Bench = tuple[dict[str, Any], str, str, str]  # figures, picture, stdout, stderr
# Ray's own cluster takes longer to start than all others; `distributed bench throughput` has it where it is installed.
NAMES = ["best-bare", "ours", "bare", "lightning", "fabric", "accelerate"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("throughput")
    command = [sys.executable, "-m", "distributed.cli", "bench", "throughput", "--tiny", "--workload", "mlp"]
    command += ["--steps", "5", "--rounds", "1", "--json", str(folder / "t.json"), "--picture", str(folder / "t.svg")]
    command += [word for name in NAMES for word in ("--only", name)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "t.json").read_text()), (folder / "t.svg").read_text(), ended.stdout, ended.stderr


def test_every_contender_has_its_figures(bench: Bench) -> None:
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


def test_all_contenders_train_the_same(bench: Bench) -> None:
    (result,) = bench[0]["workloads"]
    losses = {row["contender"]: row["loss"] for row in result["rows"]}
    assert all(math.isfinite(loss) and loss < result["start_loss"] for loss in losses.values()), losses
    assert result["losses_agree"], losses


def test_a_log_says_whose_turn_it_is(bench: Bench) -> None:
    assert all(f"mlp: rehearsing {name}" in bench[3] for name in NAMES)
    assert all(f"mlp: round 1 of 1: {name}" in bench[3] for name in NAMES)


def test_what_is_known_after_the_first_turn_is_there_before_the_second() -> None:
    wish = Wish(("mlp",), "cpu", "fp32", processes=1, rounds=1, steps=5, tiny=True)
    told: list[str] = []
    found = measure_throughput(wish, find_field(["bare"], "cpu"), lambda text, done, in_all: told.append(text))
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
def test_ours_and_the_loops_by_hand_come_to_the_same_bits(name: str, precision: str, tmp_path: Path) -> None:
    losses = {}
    for contender in ("best-bare", "bare", "ours"):
        job = WorkloadJob(
            name, 0, 1, 10, 10, str(tmp_path / contender), torch.device("cpu"), precision, 10, False, {}, tiny=True
        )
        losses[contender] = job.final_loss(CONTENDERS.load(contender)(job))
        assert losses[contender] < job.final_loss(job.make_model())
    assert len(set(losses.values())) == 1, losses


def test_the_picture_has_a_bar_for_each(bench: Bench) -> None:
    drawn = ET.fromstring(bench[1])
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert set(NAMES) <= texts


def test_a_contender_that_trained_less_is_told() -> None:
    row = Row("bare", 10.0, 9.0, 11.0, 1.0, 1.0, None, 0.1, 1.0, (10.0,))
    rows = (row, replace(row, contender="ours"), replace(row, contender="fabric", loss=2.0))
    result = WorkloadResult("mlp", "", "samples", 8, 5, 5, 1, 2.3, rows, {})
    assert not result.losses_agree
    assert replace(result, rows=rows[:2]).losses_agree


def test_ours_is_compared_with_each_peer_by_the_medians_that_are_shown() -> None:
    row = Row("ours", 10.0, 9.0, 11.0, 1.0, 1.0, None, 0.1, 1.0, (1.0, 10.0, 100.0))
    peer = replace(row, contender="fabric", units_per_second=20.0, rounds=(0.5, 20.0, 21.0))
    result = WorkloadResult("mlp", "", "samples", 8, 5, 5, 3, 2.3, (row, peer, replace(row, contender="bare")), {})
    assert result.ours_over_peers["fabric"].ratio == 0.5
    assert result.reference == "bare"
    assert replace(result, rows=(row, peer)).reference == "ours"


def test_rates_that_lie_within_their_spread_are_not_told_apart() -> None:
    ours = Row("ours", 10.2, 9.0, 11.0, 1.0, 1.0, None, 0.1, 1.0, (9.0, 10.2, 11.0))
    peer = replace(ours, contender="fabric", units_per_second=10.0, rounds=(9.2, 10.0, 10.8))
    assert compare(ours, peer).verdict == "not told apart"
    far = replace(peer, units_per_second=5.0, rounds=(4.9, 5.0, 5.1))
    assert compare(ours, far).verdict == "faster"
    assert compare(far, ours).verdict == "slower"
    assert compare(replace(ours, rounds=(10.2,)), replace(far, rounds=(5.0,))).verdict == "by one round"


def test_names_that_are_not_there_and_models_too_large_for_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="fabric"):
        find_field(["fabrik"], "cpu")
    with pytest.raises(ConfigError, match="mlp"):
        choose_workloads(["mlpp"], "cpu", ORDER, False)
    with pytest.raises(ConfigError, match="bert-large"):
        choose_workloads(["bert-large"], "cpu", ORDER, False)


def test_what_only_a_gpu_or_a_cpu_has_is_left_out_with_the_reason() -> None:
    on_cpu, on_gpu = find_field(None, "cpu"), find_field(None, "cuda")
    assert "GPU" in on_cpu.missing["floor"]
    assert "CPU" in on_gpu.missing["ray"]
    assert "floor" in on_gpu.of("mlp", "bf16")
    assert "floor" not in on_gpu.of("dlrm", "bf16")
    assert "ours-fp8" in on_gpu.of("gpt-1.3b", "bf16")
    assert "ours-free" not in find_field(None, "cuda", free_speed=False).names
    assert set(on_cpu.names) | set(on_cpu.missing) == set(CONTENDERS.entries)


def test_all_but_the_eager_loop_get_a_compiled_model_where_models_are_compiled() -> None:
    assert is_compiled("lightning", "gpt2-124m", "cuda")
    assert not is_compiled("bare", "gpt2-124m", "cuda")
    assert not is_compiled("lightning", "mlp", "cuda")
    assert not is_compiled("lightning", "gpt2-124m", "cpu")


def test_the_clock_of_ours_is_that_of_its_step_events(tmp_path: Path) -> None:
    kinds = [("EpochStarted", 0, 1.0), ("StepEnded", 5, 2.0), ("StepEnded", 10, 4.5), ("EpochEnded", 10, 9.0)]
    lines = [json.dumps({"event": kind, "step": step, "time": time}) for kind, step, time in kinds]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert looks(tmp_path / "events.jsonl", 5, 10) == [2.0, 4.5]
