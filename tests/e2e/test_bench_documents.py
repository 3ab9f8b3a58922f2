"""The tables and pictures of README.md and benchmarks/README.md are those of the files under benchmarks/."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# What was measured; the record of the GPU suite is no measurement.
RESULTS = [path for path in sorted((ROOT / "benchmarks").glob("*.json")) if path.name != "gpu-suite.json"]


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/generate_benchmarks.py"))


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_benchmark_tables_of_pages_are_current(made: dict[str, Any], page: str) -> None:
    before = (ROOT / page).read_text(encoding="utf-8")
    assert made["render"](ROOT / page) == before, "run: python docs/generate_benchmarks.py"


def test_every_result_file_is_in_the_summary_table(made: dict[str, Any]) -> None:
    table = made["summary"]()
    for path in RESULTS:
        assert f"`benchmarks/{path.name}`" in table


def test_changed_result_makes_the_page_stale(made: dict[str, Any], tmp_path: Path) -> None:
    record = json.loads((ROOT / "benchmarks/scaling.json").read_text(encoding="utf-8"))
    record["rows"][-1]["speed_up"] = 1.99
    (tmp_path / "scaling.json").write_text(json.dumps(record), encoding="utf-8")
    assert "1.99 ×" in made["summary"](tmp_path)
    assert made["render"](ROOT / "README.md", tmp_path) != (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_result_file_has_one_current_svg(made: dict[str, Any]) -> None:
    folder = ROOT / "benchmarks"
    drawn = {path.name: content for path, content in made["pictures"]().items()}
    committed = {path.name: path.read_bytes() for path in folder.glob("*.svg")}
    assert committed == drawn, "run: python docs/generate_benchmarks.py"
    assert set(drawn) == {path.with_suffix(".svg").name for path in RESULTS}


def test_benchmarks_page_shows_every_chart(made: dict[str, Any]) -> None:
    page = made["render"](ROOT / "benchmarks/README.md")
    assert all(f"({path.name})" in page for path in made["pictures"]())


def test_charts_on_the_page_follow_the_result_files(made: dict[str, Any], tmp_path: Path) -> None:
    scaling = (ROOT / "benchmarks/scaling.json").read_text(encoding="utf-8")
    (tmp_path / "scaling-large.json").write_text(scaling, encoding="utf-8")
    page = made["render"](ROOT / "benchmarks/README.md", tmp_path)
    assert "(scaling-large.svg)" in page
    assert "(scaling.svg)" not in page
    assert "(overhead.svg)" not in page
