"""Where the source of a program lies that ranks are to run; nothing of it is imported or run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder


def program_file(command: Sequence[str]) -> str | None:
    """The file of `train.py args…` or `-m package.module args…`; None: there is no source to be read.

    >>> program_file(["train.py", "--lr", "1"]), os.path.basename(program_file(["-m", "json.tool"]) or "")
    ('train.py', 'tool.py')
    """
    return command[0] if command[0] != "-m" else module_file(command[1])


def module_file(name: str) -> str | None:
    """The file that `python -m name` would run, as it is found from here."""
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
    return spec.origin if spec is not None and spec.has_location else None


def _find(name: str) -> ModuleSpec | None:
    top, *parts = name.split(".")
    if not all((top, *parts)):
        return None
    spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    found = top
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        found = f"{found}.{part}"
        spec = PathFinder.find_spec(found, spec.submodule_search_locations)
    return spec
