"""examples/02-fsdp, each script really run, on small settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import run_warm

FOLDER = Path(__file__).parents[2] / "examples" / "02-fsdp"


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def events_of(run_dir: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


@pytest.mark.parametrize(
    "launcher", [[], ["-m", "distributed", "train", "--num-gpus", "2", "--script"]], ids=["alone", "distributed train"]
)
def test_fsdp_basics_hold_half_of_the_state_on_each_rank(tmp_path: Path, launcher: list[str]) -> None:
    options = ["--", "--steps", "4"] if launcher else ["--num-gpus", "2", "--steps", "4"]
    printed = run_warm(tmp_path, *launcher, str(FOLDER / "fsdp_basics.py"), *options)
    held = re.findall(r"of ([\d,]+) bytes .* holds ([\d,]+), with ([\d,]+) .* and ([\d,]+) of optimizer", printed)
    assert len(held) == 2
    for whole, parameters, gradients, state in [[int(n.replace(",", "")) for n in found] for found in held]:
        assert parameters == gradients == whole / 2
        assert whole <= state < 1.01 * whole  # two numbers for each, and the count of steps
    assert printed.count("after 4 steps") == 1


def test_transformer_learns_with_every_option_at_once(tmp_path: Path) -> None:
    options = ["--sharding", "grad_op", "--mixed-precision", "bf16", "--recompute", "selective"]
    small = ["--num-gpus", "2", "--steps", "40", "--width", "32", "--blocks", "2"]
    run_warm(tmp_path, str(FOLDER / "fsdp_transformer.py"), *small, *options)
    first, *_, last = (event["loss"] for event in events_of(only_run(tmp_path), "StepEnded"))
    assert last < first - 0.5
    plan = json.loads((only_run(tmp_path) / "plan.json").read_text())
    assert (plan["shard"]["kind"], plan["precision"]["kind"], plan["memory"]["recompute"]) == (
        "grad_op",
        "bf16",
        "selective",
    )


def test_transformer_generates_text_from_checkpoint(tmp_path: Path) -> None:
    command = ["-m", "distributed", "train", "--num-gpus", "2", "--script", str(FOLDER / "fsdp_transformer.py"), "--"]
    printed = run_warm(tmp_path, *command, "--steps", "100", "--width", "16", "--blocks", "2", "--batch-size", "2")
    assert printed.count("on text that it has not seen") == 1
    assert "[r0] The " in printed


def test_checkpoint_of_four_shards_resumes_on_any_mesh(tmp_path: Path) -> None:
    printed = run_warm(tmp_path, str(FOLDER / "fsdp_checkpoint.py"), "--steps", "2", "--more", "2")
    rows = [[float(n) for n in line.split()] for line in printed.splitlines() if re.match(r" +\d+ +\d\.", line)]
    assert [row[0] for row in rows] == [3, 4]
    for _, *losses in rows:
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    sharded, exported = re.findall(r"(\d\.\d+), of its export in plain torch (\d\.\d+)", printed)[0]
    assert float(exported) == pytest.approx(float(sharded), rel=1e-5)


def test_measured_bytes_match_the_shard_fractions(tmp_path: Path) -> None:
    small = ["--rounds", "1", "--steps", "2", "--width", "32", "--json", str(tmp_path / "result.json")]
    run_warm(tmp_path, str(FOLDER / "measure.py"), *small)
    rows = {row["sharding"]: row for row in json.loads((tmp_path / "result.json").read_text())["rows"]}
    whole = rows["none"]["parameters"]
    parts = {name: (row["parameters"] / whole, row["parameters_after_forward"] / whole) for name, row in rows.items()}
    assert parts["zero1"] == (1, 1)
    assert parts["grad_op"] == (0.25, 1)
    assert parts["full"][0] == 0.25
    assert parts["hybrid"][0] == 0.5
    assert 0.25 < parts["full"][1] < 1
    assert rows["zero1"]["optimizer"] < 0.3 * rows["none"]["optimizer"]
    assert rows["none"]["time_ratio_to_ddp"] == 1
