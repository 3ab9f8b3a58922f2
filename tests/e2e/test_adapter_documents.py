"""The snippets of docs/switching.md: what was there before runs as well, and few lines change."""

from __future__ import annotations

import difflib
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.conftest import clean_environ
from tests.warm_python import SCRIPTS

PAGE = (Path(__file__).parents[2] / "docs/switching.md").read_text()
PAIRS = re.findall(r"\n\n((?: {4}[^\n]*\n|\n)+?)\nbecomes\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SWITCHES = list(zip(("lightning", "accelerate", "transformers"), PAIRS, strict=True))


@pytest.mark.parametrize(("name", "pair"), SWITCHES)
def test_script_before_the_switch_runs(name: str, pair: tuple[str, str], tmp_path: Path) -> None:
    before = textwrap.dedent(pair[0])
    assert f"import {name}" in before or f"from {name}" in before
    (tmp_path / "script.py").write_text(before)
    command = [*SCRIPTS.command, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "pair"), SWITCHES)
def test_switch_changes_one_line_beside_imports(name: str, pair: tuple[str, str]) -> None:
    before, after = textwrap.dedent(pair[0]).strip().splitlines(), pair[1].strip().splitlines()
    changed = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len([line for line in changed if not line.startswith(("import ", "from "))]) == 1, changed
