"""A public class name exists once: who reads it in a message or a trace knows which class it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import distributed

PACKAGE = Path(distributed.__file__).parent


def in_package() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def repeated_names(modules: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Public class names with more than one class, and the files of these."""
    files = defaultdict(list)
    for file, tree in modules:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(file)
    return {name: found for name, found in files.items() if len(found) > 1}


def test_public_class_name_exists_once() -> None:
    assert repeated_names(in_package()) == {}, "name the classes by what they are of: SaveJob, KerasLoop"


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("class Job: ...", "class Job: ...", ["Job"]),
        ("class Job: ...", "if True:\n    class Job(Base): ...", ["Job"]),
        ("class _Job: ...", "class _Job: ...", []),
        ("class Job: ...", "from one import Job", []),
    ],
)
def test_repeated_class_name_is_found(one: str, other: str, found: list[str]) -> None:
    assert [*repeated_names([("one.py", ast.parse(one)), ("other.py", ast.parse(other))])] == found
