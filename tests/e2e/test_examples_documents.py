"""The documents are true: their Python runs as written, their references are current, their links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from distributed.core.events import event_kinds
from tests.conftest import clean_environ
from tests.ray_clusters import QUICK
from tests.ray_python import AS_PYTHON
from tests.ray_template import ray_template
from tests.warm_python import SCRIPTS
from tests.warm_scripts import warm_tensorflow

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
SNIPPETS = {
    f"{path.relative_to(ROOT)}:{text[: found.start()].count(chr(10)) + 2}": found.group(1)
    for path in DOCUMENTS
    for text in [path.read_text()]
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
}


def python_for(where: str) -> tuple[list[str], dict[str, str]]:
    """What runs a snippet, and with which variables: the first one a new interpreter, the others a fork."""
    if where == next(iter(SNIPPETS)):
        return [sys.executable], {}
    if "RayTrainer" in SNIPPETS[where]:
        return [ray_template().python], QUICK | {AS_PYTHON: ray_template().python}
    return SCRIPTS.command, {}


@pytest.mark.parametrize("where", SNIPPETS)
def test_python_in_documents_runs_as_written(where: str, tmp_path: Path) -> None:
    if "TensorFlow" in SNIPPETS[where]:
        done = warm_tensorflow().run_code(tmp_path, SNIPPETS[where], environ=clean_environ())
    else:
        (tmp_path / "script.py").write_text(SNIPPETS[where])
        python, variables = python_for(where)
        environ = clean_environ(**variables)
        command = [*python, "script.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert json.loads((run_dir / "history.json").read_text())["world_size"] == 2


@pytest.mark.parametrize("page", ["settings", "engines"])
def test_generated_pages_are_current(page: str) -> None:
    before = (ROOT / f"docs/{page}.md").read_text()
    script = "import runpy, sys; sys.stdout.write(runpy.run_path(sys.argv[1])['render']())"
    command = [sys.executable, "-c", script, str(ROOT / f"docs/generate_{page}.py")]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    assert rendered == before, f"run: python docs/generate_{page}.py"


def test_events_reference_names_every_kind_and_field() -> None:
    text = (ROOT / "docs/events.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    documented = {
        kind: {
            name for row in re.findall(r"^\| (`.*?`) \|", body, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        for kind, body in sections.items()
    }
    assert documented == {kind: set(fields) - {"time"} for kind, fields in event_kinds().items()}


def test_architecture_page_shows_the_enforced_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in contracts if contract["type"] == "layers"]
    (layers,) = (contract["layers"] for contract in layered if "containers" not in contract)
    enforced = [{name.strip().removeprefix("distributed.") for name in layer.split("|")} for layer in layers]
    rows = re.findall(r"^\| \d+ \| (.*?) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    shown = [{name.removesuffix(".py").replace("/", ".") for name in re.findall(r"`([^`]+)`", row)} for row in rows]
    assert shown == enforced


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_documents_exist(document: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", document.read_text())]
    missing = [link for link in links if link and "://" not in link and not (document.parent / link).exists()]
    assert not missing
