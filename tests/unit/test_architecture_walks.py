"""The walks of docs/architecture.md name what exists, and their counts are those of their lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest

import distributed

SOURCE = Path(distributed.__file__).parent
PAGE, _, TEXT = (
    (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8").partition("## Five walks\n")
)
WALKS = {
    title: re.findall(r"^(\d+)\. `([^`:]+):([^`]+)`: \S", body, re.MULTILINE)
    for title, body in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)
}
ROWS = {
    title: tuple(map(int, numbers))
    for title, *numbers in re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \| \d+ / \d+ \|$", TEXT, re.MULTILINE)
}


def changes(folders: Sequence[str]) -> int:
    return sum(one != other for one, other in pairwise(folders))


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, and the methods that a class defines itself."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (*kinds, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, kinds)}
    return found


def test_page_says_where_what_is_looked_for_most_is() -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE)
    assert len(named) > 12
    missing = [f"{file}:{name}" for file, name in named if name not in names_in(SOURCE / file)]
    assert not missing


def test_each_of_five_walks_has_a_row_in_the_table() -> None:
    assert len(WALKS) == 5
    assert list(ROWS) == list(WALKS)


@pytest.mark.parametrize("title", WALKS)
def test_every_stop_of_a_walk_exists(title: str) -> None:
    stops = [(file, name) for _, file, name in WALKS[title]]
    missing = [f"{file}:{name}" for file, name in stops if name not in names_in(SOURCE / file)]
    assert not missing


@pytest.mark.parametrize("title", WALKS)
def test_printed_counts_of_a_walk_match_its_list(title: str) -> None:
    numbers, files, _ = zip(*WALKS[title], strict=True)
    folders = [str(PurePosixPath(file).parent) for file in files]
    packages = [folder.partition("/")[0] for folder in folders]
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert ROWS[title] == (len(files), changes(packages), changes(folders))
