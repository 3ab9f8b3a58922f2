"""Pictures of benchmarks: each is drawn from the record that `--json` writes, whatever in it is missing."""

from __future__ import annotations

import copy
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distributed.bench.collectives import OPERATIONS, Collectives, summarize
from distributed.bench.panels import WIDTH
from distributed.bench.pictures import draw
from distributed.cli.bench import app
from distributed.core.errors import ConfigError

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.json"))
SIZES = (1024, 4096, 16384)
Record = dict[str, Any]


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
    return Collectives(rows, "gloo", 2, 2, missing or {}, 0.5, 1.0).to_dict()


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def rows_of(record: Record) -> list[Record]:
    if "workloads" in record:
        return [row for result in record["workloads"] for row in result["rows"]]
    rows: list[Record] = record["rows"]
    return rows


@pytest.mark.parametrize(
    "record", [*map(read, (path.stem for path in COMMITTED)), sent()], ids=lambda r: r.get("benchmark")
)
def test_every_contender_of_a_record_has_its_name(record: Record) -> None:
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
def test_a_label_says_what_the_record_holds(name: str) -> None:
    who, figures, label = EXPECTED[name]
    record = read(name)
    assert label not in texts(draw(record))
    row_of(record, who).update(figures)
    assert label in texts(draw(record))


def test_what_we_hold_ourselves_to_is_a_line_with_its_name() -> None:
    for name, said in (("overhead", "our limit: 20 µs"), ("tune", "our limit: 1.15"), ("checkpoint", "× the copy")):
        picture = draw(read(name))
        assert any(said in word for word in texts(picture))
        assert picture.count('class="limit"') == 1


def test_what_was_not_measured_is_said() -> None:
    record = read("strategies")
    row_of(record, "cpu_offload")["peak_gib"] = None
    row_of(record, "selective")["peak_gib"] = 1.5
    assert {"not measured", "1.5 GiB"} <= set(texts(draw(record)))


def test_a_label_follows_its_figure() -> None:
    record = read("scaling")
    record["rows"][-1] |= {"samples_per_second": 1700.0, "efficiency": 0.95}
    assert "1.7 k · 95%" in texts(draw(record))


def test_trainings_that_were_not_equal_are_marked() -> None:
    record = read("throughput-cpu")
    assert not any("DO NOT AGREE" in word for word in texts(draw(record)))
    record["workloads"][0]["losses_agree"] = False
    assert any("DO NOT AGREE" in word for word in texts(draw(record)))


def test_every_kill_is_a_circle() -> None:
    record = read("recovery")
    seconds = sum(len(row["seconds"]) for row in record["rows"]) + sum(map(len, record["starts_s"].values()))
    assert draw(record).count("<circle") == seconds


def test_a_bar_below_zero_is_drawn_to_the_left_of_it_with_a_width() -> None:
    record = read("overhead")
    record["rows"][1] |= {"over_us": -40.0, "over_error_us": 3.0}
    picture = draw(record)
    assert "-40 ± 3 µs" in texts(picture)
    assert all(width >= 0 for width in boxes(picture, "width"))
    assert all(0 <= x <= WIDTH for x in boxes(picture, "x"))


def boxes(picture: str, attribute: str) -> list[float]:
    found = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect")
    return [float(element.get(attribute, "0")) for element in found]


@pytest.mark.parametrize(
    "record", [*map(read, (path.stem for path in COMMITTED)), sent()], ids=lambda r: r.get("benchmark")
)
def test_figures_that_are_unknown_or_zero_and_a_single_row_do_not_break_it(record: Record) -> None:
    fields = {key for row in rows_of(record) for key, value in row.items() if isinstance(value, float)}
    assert fields
    for value in (None, 0.0, math.nan):
        for field in fields:
            changed = copy.deepcopy(record)
            for row in rows_of(changed):
                row[field] = value
            assert "</svg>" in draw(changed)
            assert "nan" not in draw(changed)
    for one in [record, *record.get("workloads", [])]:
        if "rows" in one:
            del one["rows"][1:]
            assert texts(draw(record))
            del one["rows"][:]
    assert texts(draw(record))


def test_an_operation_that_is_left_out_is_named_and_none_at_all_is_said() -> None:
    words = texts(draw(sent({"reduce-scatter": "gloo has none"})))
    assert any("left out: reduce-scatter" in word for word in words)
    assert not any(word.startswith("reduce-scatter") for word in words)
    assert "nothing was measured" in texts(draw(sent(dict.fromkeys(OPERATIONS, "gone"))))


def test_lines_of_collectives_end_with_the_figures_of_the_largest_message() -> None:
    record = sent()
    last = [row for row in record["rows"] if row["size_bytes"] == SIZES[-1]]
    words = texts(draw(record))
    for row in last:
        assert f"{row['operation']} {row['latency_us']:.3g} µs" in words
        assert f"{row['operation']} {row['bus_gb_s']:.3g} GB/s" in words
    assert {"1 KiB", "4 KiB", "16 KiB"} <= set(words)


def test_what_a_name_may_hold_does_not_break_the_picture() -> None:
    record = read("scaling")
    record["machine"]["cpu"] = "A<B> & C"
    assert any("A<B> & C" in word for word in texts(draw(record)))


def test_a_benchmark_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="speed"):
        draw({"benchmark": "speed"})


@pytest.mark.parametrize("verb", sorted(command.name or "" for command in app.registered_commands))
def test_a_file_that_could_not_be_written_is_refused_before_anything_starts(verb: str, tmp_path: Path) -> None:
    wrong = [["--picture", "found.png"], ["--picture", str(tmp_path / "no/found.svg")]]
    for words in [*wrong, ["--json", str(tmp_path / "no/found.json")]]:
        ended = CliRunner().invoke(app, [verb, *words])
        assert isinstance(ended.exception, ConfigError), ended.output
        assert words[1] in str(ended.exception)
