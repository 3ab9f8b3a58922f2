"""What contributors are told to open is there: the paths of CONTRIBUTING.md, and those that start a commit's hooks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from fnmatch import filter as matching
from functools import cache
from pathlib import Path

import pytest
import yaml

from distributed.core.settings import SECTIONS

ROOT = Path(__file__).parents[2]
HOOKS = {
    hook["id"]: hook["files"]
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    for hook in repo["hooks"]
    if "files" in hook
}


@cache
def tracked() -> list[str]:
    """Every tracked file and folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [file for file in listed if (ROOT / file).is_file()]
    return sorted({*files, *(str(folder) for file in files for folder in Path(file).parents)})


def alternatives(pattern: str) -> Iterator[str]:
    """The patterns without `|` that a pattern with groups stands for."""
    group = re.search(r"\(([^()]*)\)", pattern)
    if group is None:
        yield pattern
        return
    for part in group[1].split("|"):
        yield from alternatives(pattern[: group.start()] + part + pattern[group.end() :])


def test_every_path_of_contributing_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    quoted = {word for words in re.findall(r"`([^`\n]+)`|\]\(([^)]+)\)|^ {4}(.*)", text, re.M) for word in words}
    words = {word for part in quoted for word in part.split() if not word.startswith((".venv/", "http"))}
    paths = {word.rstrip("/") for word in words if re.fullmatch(r"[\w./<>-]+(/|\.(py|md|sh|toml|yml))", word)}
    assert {"src/distributed", "launch/base.py", "engines/<name>", "docs/glossary.md"} <= paths
    patterns = {path: re.sub("<[a-z]+>", "*", path) for path in paths}
    gone = [
        path
        for path, pattern in patterns.items()
        if not matching(tracked(), pattern) and not matching(tracked(), f"src/distributed/{pattern}")
    ]
    assert not gone, f"CONTRIBUTING.md names what is not there: {gone}"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_file_pattern_of_a_hook_matches(hook: str) -> None:
    gone = [each for each in alternatives(HOOKS[hook]) if not any(re.search(each, path) for path in tracked())]
    assert not gone, f"the hook {hook} waits for files that are not there: {gone}"


def test_hooks_of_made_pages_are_started_by_their_sources() -> None:
    fields = {f"src/{section.__module__.replace('.', '/')}.py" for section in SECTIONS.values()}
    declarations = matching(tracked(), "src/distributed/*/declaration.py")
    assert all(re.search(HOOKS["settings-page"], path) for path in fields)
    assert all(re.search(HOOKS["engines-page"], path) for path in declarations)
