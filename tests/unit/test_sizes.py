"""Files, functions, folders and names of tests stay small enough to be read whole: past that, they hold two ideas."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import distributed

PACKAGE = Path(distributed.__file__).parent
TESTS = Path(__file__).parents[1]
LINES_OF_FILE, LINES_OF_FUNCTION, MODULES_OF_FOLDER, LETTERS_OF_TEST, TERMS_OF_GLOSSARY = 400, 80, 17, 60, 30

OPTIONS = "each option of the command is an argument with a line of its own"
LONG = {
    "bench/throughput/command.py:throughput": OPTIONS,
    "bench/throughput/command.py:throughput_command": OPTIONS,
    "cli/train.py:train": OPTIONS,
    "cli/tune.py:tune": OPTIONS,
}


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > LINES_OF_FUNCTION:
                yield node.name


def modules() -> list[Path]:
    return [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]


def test_files_have_at_most_400_lines() -> None:
    counts = {str(path): len((PACKAGE / path).read_text().splitlines()) for path in modules()}
    long = {path: count for path, count in counts.items() if count > LINES_OF_FILE}
    assert long == {}, "which of its ideas can have a file of its own?"


def test_functions_have_at_most_80_lines() -> None:
    found = {
        f"{path.as_posix()}:{name}"
        for path in modules()
        for name in long_functions(ast.parse((PACKAGE / path).read_text()))
    }
    assert found - LONG.keys() == set(), "which part of it has a name?"
    assert LONG.keys() - found == set(), "they are shorter now"


def test_folders_have_about_16_modules_side_by_side() -> None:
    counts = Counter(str(path.parent) for path in modules() if path.name != "__init__.py")
    crowded = {folder: count for folder, count in counts.items() if count > MODULES_OF_FOLDER}
    assert crowded == {}, "which of these belong together?"


def test_glossary_has_at_most_30_terms() -> None:
    terms = re.findall(r"^\| \*\*", (TESTS.parent / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 20 < len(terms) <= TERMS_OF_GLOSSARY, "which of them is the field's own, and needs no entry?"


def test_names_of_tests_have_at_most_60_letters() -> None:
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    names = [name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)]
    assert len(names) > 2000
    assert [name for name in names if len(name) > LETTERS_OF_TEST] == [], "subject, condition, result"


@pytest.mark.parametrize(("lines", "is_long"), [(LINES_OF_FUNCTION, False), (LINES_OF_FUNCTION + 1, True)])
def test_function_longer_than_80_lines_is_detected(lines: int, is_long: bool) -> None:
    code = "def f():\n" + "    ...\n" * (lines - 1)
    assert [*long_functions(ast.parse(code))] == ["f"] * is_long
