"""The tables of README.md and benchmarks/README.md are those of the files under benchmarks/."""

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
