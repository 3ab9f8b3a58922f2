"""`distributed bench throughput --script`: what of a run's events counts, and what is refused before one starts."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distributed.bench.pictures import draw
from distributed.bench.script.benchmark import read_turn
from distributed.bench.script.results import ScriptThroughput, ScriptTurn, summarize_turns
from distributed.cli import bench
from distributed.core.errors import ConfigError, LaunchError
from distributed.core.plan import BatchPlan, Plan
from distributed.core.run_dir import RunDir


def run_with(folder: Path, *logged: tuple[int, float]) -> RunDir:
    """Whose events have these steps and rates, and others between them."""
    events: list[dict[str, Any]] = [{"event": "RunStarted"}]
    for step, rate in logged:
        events += [{"event": "StepEnded", "step": step, "samples_per_second": rate, "loss": 1 / step}]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (folder / "plan.json").write_text(Plan("run", BatchPlan(8, ranks=2)).to_json())
    return RunDir(folder)


def test_rate_is_that_of_the_timed_steps_alone(tmp_path: Path) -> None:
    turn = read_turn(run_with(tmp_path, (5, 1.0), (10, 1.0), (20, 100.0), (22, 50.0), (30, 100.0), (40, 1.0)), 10, 30)
    assert turn.samples_per_second == pytest.approx(20 / (10 / 100 + 2 / 50 + 8 / 100))
    assert (turn.global_batch, turn.loss) == (16, 1 / 30)


@pytest.mark.parametrize("logged", [[], [(10, 1.0)], [(20, 1.0), (30, 1.0)]])
def test_run_without_the_timed_steps_is_refused(logged: list[tuple[int, float]], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no step 10 and 30"):
        read_turn(run_with(tmp_path, *logged), 10, 30)


def found(*rates: float) -> ScriptThroughput:
    turns = {number: [ScriptTurn(number * rate, 8 * number, 0.5) for rate in rates] for number in (1, 4)}
    shape: dict[str, Any] = {"steps": 5, "warm": 10, "rounds": len(rates), "device": "cpu", "devices": 4}
    rows = summarize_turns(turns)
    return ScriptThroughput("train.py", settings=(), rows=rows, load_before=0.5, load_after=1.0, **shape)


def test_speed_up_is_that_of_the_medians() -> None:
    one, four = found(100.0, 10.0, 110.0).rows
    assert (one.samples_per_second, one.speed_up, one.efficiency) == (100.0, 1.0, 1.0)
    assert (four.samples_per_second, four.speed_up, four.efficiency) == (400.0, 4.0, 1.0)
    assert four.step_ms == pytest.approx(32 / 400 * 1e3)
    assert four.low < 400.0 < four.high


def test_chart_shows_rate_speed_up_and_efficiency() -> None:
    record = json.loads(json.dumps(found(100.0, 110.0, 120.0).to_dict()))
    record["rows"][1]["efficiency"] = None
    words = [text.text or "" for text in ET.fromstring(draw(record)).iter("{http://www.w3.org/2000/svg}text")]
    assert {"1 rank", "4 ranks", "110 · 1.00 ×, 100%", "440 · 4.00 ×, ?"} <= set(words), words
    record["rows"] = []
    assert "</svg>" in draw(record).decode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--script", "gone.py"], "gone.py is not there"),
        (["--script", __file__, "--processes", "1"], "compared with one rank"),
        (["--script", __file__, "max_steps=5"], "--steps N"),
        (["--script", __file__, "checkpoint_dir=mine"], "a folder of its own"),
        (["--script", __file__, "--workload", "mlp", "--tiny"], "--workload and --tiny are given"),
        (["learning_rate=0.1"], "settings is given"),
        (["--config", "train.yaml"], "--config is given"),
    ],
)
def test_contradicting_words_are_refused_before_a_run(words: list[str], said: str) -> None:
    ended = CliRunner().invoke(bench.app, ["throughput", "--processes", "2", *words])
    assert isinstance(ended.exception, ConfigError), ended.output
    assert said in str(ended.exception)
