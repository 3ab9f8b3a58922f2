"""The Makefile and the files it uses: which failures count, what is pinned, what is done without root."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, check=False)


def test_make_help_lists_every_target() -> None:
    targets = set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
    assert set(re.findall(r"^make ([\w-]+) ", make(ROOT, "help").stdout, re.MULTILINE)) == targets - {"help"}


@pytest.mark.parametrize("target", ["test", "test-gpu"])
@pytest.mark.parametrize(("code", "passes"), [(0, True), (1, False), (5, False)], ids=["pass", "fail", "none found"])
def test_make_test_passes_only_when_pytest_does(tmp_path: Path, target: str, code: int, passes: bool) -> None:
    """The real recipe with a stand-in for pytest."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/system_tools.sh").write_text("")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/build_horovod.sh").write_text("")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/installed-all").touch()
    (tmp_path / "pytest.sh").write_text(f"echo ran; exit {code}\n")
    done = make(tmp_path, "-o", ".venv/installed-all", target, "PYTEST=sh pytest.sh")
    assert (done.returncode == 0) == passes
    assert "ran" in done.stdout.splitlines()


def test_constraints_pin_torch_and_every_direct_dependency() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[<>=\[; ]", requirement)[0].lower() for group in groups for requirement in group}
    assert names <= {name.lower() for name in pins}


def test_workflow_tests_the_oldest_and_the_pinned_torch() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["make"]["strategy"]["matrix"]
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest,) = (name.removeprefix("torch>=") for name in dependencies if name.startswith("torch>="))
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert matrix["torch"] == [f"{oldest}.0", pinned]


def test_system_tools_lists_what_it_cannot_install(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = str(ROOT / "tests/system_tools.sh")
    done = subprocess.run(
        [bash, script], env={"PATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "mpirun" in line
    assert "tmux" in line
