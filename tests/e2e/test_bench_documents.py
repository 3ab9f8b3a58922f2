"""The tables and pictures of README.md and benchmarks/README.md are those of the files under benchmarks/."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/generate_benchmarks.py"))


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_tables_of_measurements_are_current(made: dict[str, Any], page: str) -> None:
    before = (ROOT / page).read_text(encoding="utf-8")
    assert made["render"](ROOT / page) == before, "run: python docs/generate_benchmarks.py"


def test_every_file_of_results_has_a_line(made: dict[str, Any]) -> None:
    table = made["summary"]()
    for path in (ROOT / "benchmarks").glob("*.json"):
        assert f"`benchmarks/{path.name}`" in table


def test_a_changed_number_makes_a_page_stale(made: dict[str, Any], tmp_path: Path) -> None:
    record = json.loads((ROOT / "benchmarks/scaling.json").read_text(encoding="utf-8"))
    record["rows"][-1]["speed_up"] = 1.99
    (tmp_path / "scaling.json").write_text(json.dumps(record), encoding="utf-8")
    assert "1.99 ×" in made["summary"](tmp_path)
    assert made["render"](ROOT / "README.md", tmp_path) != (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_of_results_has_its_current_picture_and_no_picture_is_left_over(made: dict[str, Any]) -> None:
    folder = ROOT / "benchmarks"
    drawn = {path.name: text for path, text in made["pictures"]().items()}
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    assert committed == drawn, "run: python docs/generate_benchmarks.py"
    assert set(drawn) == {path.with_suffix(".svg").name for path in folder.glob("*.json")}


def test_the_page_of_benchmarks_shows_every_picture(made: dict[str, Any]) -> None:
    page = made["render"](ROOT / "benchmarks/README.md")
    assert all(f"({path.name})" in page for path in made["pictures"]())


def test_a_file_that_comes_gets_a_picture_on_the_page_and_one_that_goes_loses_it(
    made: dict[str, Any], tmp_path: Path
) -> None:
    scaling = (ROOT / "benchmarks/scaling.json").read_text(encoding="utf-8")
    (tmp_path / "scaling-large.json").write_text(scaling, encoding="utf-8")
    page = made["render"](ROOT / "benchmarks/README.md", tmp_path)
    assert "(scaling-large.svg)" in page
    assert "(scaling.svg)" not in page
    assert "(overhead.svg)" not in page
