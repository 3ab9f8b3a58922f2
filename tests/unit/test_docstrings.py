"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import distributed

MODULES = [name for _, name, _ in pkgutil.walk_packages(distributed.__path__, "distributed.") if "__main__" not in name]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:  # a peer that a benchmark compares with
        pytest.skip(f"{name} needs {missing.name}, which is not installed")
    result = doctest.testmod(module, extraglobs={"tmp": tmp_path}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples_to_run() -> None:
    finder = doctest.DocTestFinder()
    found = sum(bool(test.examples) for test in finder.find(importlib.import_module("distributed.core.env")))
    assert found >= 3
