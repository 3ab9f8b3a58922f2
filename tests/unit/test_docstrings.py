"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import distributed

ROOT = Path(distributed.__file__).parent
FILES = [path.relative_to(ROOT.parent) for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text()]
MODULES = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:  # a peer that a benchmark compares with
        pytest.skip(f"{name} needs {missing.name}, which is not installed")
    result = doctest.testmod(module, extraglobs={"tmp": tmp_path}, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0, "its example is in no docstring that doctest finds"
    assert result.failed == 0
