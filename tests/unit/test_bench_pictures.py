"""Pictures of benchmarks: each is drawn from the record that `--json` writes, whatever in it is missing."""

from __future__ import annotations

import copy
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.suite import pictures
from benchmarks.suite.__main__ import app as suite
from distributed.bench.collectives.benchmark import OPERATIONS, CollectiveTimes, summarize
from distributed.cli import bench
from distributed.core import registry
from distributed.core.errors import ConfigError, MissingExtraError

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMITTED = sorted(path for path in FOLDER.glob("*.json") if path.name != "gpu-suite.json")
ONE_OF_EACH = [path for path in COMMITTED if path.stem in ("throughput-cpu", "overhead") or "-" not in path.stem]
COMMANDS = [(bench.app, "distributed bench"), (suite, "benchmarks.suite")]
SIZES = (1024, 4096, 16384)
Record = dict[str, Any]
SVG = "{http://www.w3.org/2000/svg}"


def read(name: str) -> Record:
    path = next(path for path in COMMITTED if path.stem == name)
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def sent(missing: dict[str, str] | None = None) -> Record:
    """What `bench collectives` would have written of made-up times."""
    rows = tuple(
        summarize(operation, size, 2, [1e-4 * (place + 1), 2e-4 * (place + 1)])
        for place, operation in enumerate(OPERATIONS)
        for size in SIZES
        if operation not in (missing or {})
    )
    return CollectiveTimes(
        rows, backend="gloo", processes=2, rounds=2, missing=missing or {}, load_before=0.5, load_after=1.0
    ).to_dict()


def draw(record: Record) -> str:
    return pictures.draw(record).decode()


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def kind_of(record: Record) -> str:
    return str(record.get("benchmark", "strategies"))


def rows_of(record: Record) -> list[Record]:
    if "workloads" in record:
        return [row for result in record["workloads"] for row in result["rows"]]
    rows: list[Record] = record.get("rows", [record])
    return rows


@pytest.mark.parametrize("record", [*map(read, (path.stem for path in COMMITTED)), sent()], ids=kind_of)
def test_chart_names_every_contender(record: Record) -> None:
    words = texts(draw(record))
    names = {row.get(key) for row in rows_of(record) for key in ("contender", "name", "side", "operation")} - {None}
    for name in names:
        assert any(name in word for word in words), name
    assert any("torch 2." in word for word in words)


def row_of(record: Record, name: str) -> Record:
    return next(row for row in rows_of(record) if name in (row.get("contender"), row.get("name"), row.get("side")))


EXPECTED: dict[str, tuple[str, dict[str, float], str]] = {  # whose row, what it is made to hold, what is then said
    "overhead": ("ours", {"over_us": 12.0, "over_error_us": 3.0}, "+12 ± 3 µs"),
    "checkpoint": ("save", {"total_s": 0.5, "written_mib": 28.0}, "0.50 s · 28 MiB written"),
    "recovery": (
        "ours",
        {"p50_s": 0.25, "p95_s": 0.5, "recovered": 19, "kills": 20},
        "p50 0.25 s, p95 0.50 s · 19 of 20",
    ),
    "start": ("fsdp", {"first_step_s": 6.0, "of_peer": 0.75}, "6.00 s · 0.75 × by hand"),
    "strategies": ("cpu_offload", {"step_ms": 500.0, "ratio": 2.5}, "500.0 ms · 2.50 ×"),
    "throughput-cpu": ("ours", {"units_per_second": 65400.0, "ratio": 1.25}, "65.4 k · 1.25 ×"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_chart_label_follows_the_row_of_the_record(name: str) -> None:
    who, figures, label = EXPECTED[name]
    record = read(name)
    assert label not in texts(draw(record))
    row_of(record, who).update(figures)
    assert label in texts(draw(record))


def test_chart_draws_our_limit_as_a_named_line() -> None:
    for name, said in (("overhead", "our limit: 20 µs"), ("tune", "our limit: 1.15"), ("checkpoint", "× the copy")):
        picture = draw(read(name))
        assert any(said in word for word in texts(picture))
        assert picture.count('id="limit"') == 1


def test_chart_says_not_measured_for_missing_values() -> None:
    record = read("strategies")
    row_of(record, "cpu_offload")["peak_gib"] = None
    row_of(record, "selective")["peak_gib"] = 1.5
    assert {"not measured", "1.5 GiB"} <= set(texts(draw(record)))


def test_scaling_chart_label_follows_rate_and_efficiency() -> None:
    record = read("scaling")
    record["rows"][-1] |= {"samples_per_second": 1700.0, "efficiency": 0.95}
    assert "1.7 k · 95%" in texts(draw(record))


def test_chart_marks_losses_that_do_not_agree() -> None:
    record = read("throughput-cpu")
    assert not any("DO NOT AGREE" in word for word in texts(draw(record)))
    record["workloads"][0]["losses_agree"] = False
    assert any("DO NOT AGREE" in word for word in texts(draw(record)))


def groups(picture: str, name: str) -> list[ET.Element]:
    return [group for group in ET.fromstring(picture).iter(f"{SVG}g") if group.get("id") == name]


def test_recovery_chart_has_a_dot_for_every_kill() -> None:
    record = read("recovery")
    seconds = sum(len(row["seconds"]) for row in record["rows"]) + sum(map(len, record["starts_s"].values()))
    assert sum(1 for group in groups(draw(record), "measurements") for _ in group.iter(f"{SVG}use")) == seconds


def test_negative_bar_is_drawn_left_of_zero() -> None:
    record = read("overhead")
    record["rows"][1] |= {"over_us": -40.0, "over_error_us": 3.0}
    picture = draw(record)
    assert "-40 ± 3 µs" in texts(picture)
    bars = [extent(group) for group in groups(picture, "bar")]
    assert len(bars) == len(record["rows"])
    zero = min(left for place, (left, _) in enumerate(bars) if place > 1)
    left, right = bars[1]
    assert left < right == pytest.approx(zero)


def extent(bar: ET.Element) -> tuple[float, float]:
    """From where to where a bar reaches."""
    (path,) = bar.iter(f"{SVG}path")
    across = [float(word) for word in re.findall(r"[ML] (\S+)", path.get("d", ""))]
    return min(across), max(across)


@pytest.mark.parametrize("record", [*map(read, (path.stem for path in ONE_OF_EACH)), sent()], ids=kind_of)
def test_chart_survives_missing_zero_and_nan_values(record: Record) -> None:
    fields = {key for row in rows_of(record) for key, value in row.items() if isinstance(value, float)}
    assert fields
    assert "</svg>" in draw(with_values(record, fields, None))
    for field in fields:
        pictures.DRAWINGS[kind_of(record)](with_values(record, {field}, None))
    for value in (0.0, math.nan):
        picture = draw(with_values(record, fields, value))
        assert "</svg>" in picture
        assert "nan" not in texts(picture)
        for field in fields:
            pictures.DRAWINGS[kind_of(record)](with_values(record, {field}, 0.0))
    for one in [record, *record.get("workloads", [])]:
        if "rows" in one:
            del one["rows"][1:]
            assert texts(draw(record))
            del one["rows"][:]
    assert texts(draw(record))


def with_values(record: Record, fields: set[str], value: float | None) -> Record:
    changed = copy.deepcopy(record)
    for row in rows_of(changed):
        row |= dict.fromkeys(fields & set(row), value)
    return changed


def test_collectives_chart_names_skipped_operations() -> None:
    words = texts(draw(sent({"reduce-scatter": "gloo has none"})))
    assert any("left out: reduce-scatter" in word for word in words)
    assert not any(word.startswith("reduce-scatter") for word in words)
    assert "nothing was measured" in texts(draw(sent(dict.fromkeys(OPERATIONS, "gone"))))


def test_collectives_chart_labels_the_largest_message() -> None:
    record = sent()
    last = [row for row in record["rows"] if row["size_bytes"] == SIZES[-1]]
    words = texts(draw(record))
    for row in last:
        assert f"{row['operation']} {row['latency_us']:.3g} µs" in words
        assert f"{row['operation']} {row['bus_gb_s']:.3g} GB/s" in words
    assert {"1 KiB", "4 KiB", "16 KiB"} <= set(words)


def test_chart_escapes_markup_in_names() -> None:
    record = read("scaling")
    record["machine"]["cpu"] = "A<B> & C"
    assert any("A<B> & C" in word for word in texts(draw(record)))


def test_unknown_benchmark_is_refused() -> None:
    with pytest.raises(ConfigError, match="speed"):
        draw({"benchmark": "speed"})


def test_chart_bytes_are_reproducible_and_png_is_supported() -> None:
    record = read("scaling")
    assert pictures.draw(record) == pictures.draw(record)
    assert pictures.draw(record, "png").startswith(b"\x89PNG")


VERBS = [
    pytest.param(app, command.name or "", id=f"{name} {command.name}")
    for app, name in COMMANDS
    for command in app.registered_commands
    if not command.hidden
]


@pytest.mark.parametrize(("app", "verb"), VERBS)
def test_unwritable_output_file_is_refused_before_start(app: typer.Typer, verb: str, tmp_path: Path) -> None:
    wrong = [["--picture", "found.pdf"], ["--picture", str(tmp_path / "no/found.svg")]]
    for words in [*wrong, ["--json", str(tmp_path / "no/found.json")]]:
        ended = CliRunner().invoke(app, [verb, *words])
        assert isinstance(ended.exception, ConfigError), ended.output
        assert words[1] in str(ended.exception)


def test_missing_pictures_extra_is_named_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    ended = CliRunner().invoke(bench.app, ["scaling", "--picture", "found.svg"])
    assert isinstance(ended.exception, MissingExtraError), ended.output
    assert 'pip install "distributed-training[pictures]"' in str(ended.exception)


@pytest.mark.parametrize("verb", bench.MOVED)
def test_moved_bench_command_names_its_replacement(verb: str) -> None:
    ended = CliRunner().invoke(bench.app, [verb, "--json", "found.json"])
    assert isinstance(ended.exception, ConfigError)
    assert f"python -m benchmarks.suite {bench.MOVED[verb]} --json found.json" in str(ended.exception)
    assert bench.MOVED[verb] in {command.name for command in suite.registered_commands}
