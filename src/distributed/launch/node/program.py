"""The user's program as Python itself would run it: `__main__`, `sys.argv`, `sys.path`, modules, process title."""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

_OURS = "distributed"
_ARG_START, _ARG_END = 47, 48  # of the fields in /proc/self/stat, from 0


def load(command: Sequence[str]) -> tuple[ModuleType, CodeType]:
    """The program as a fresh `__main__` and its code, with sys.argv and sys.path as `python` itself sets them."""
    if command[0] == "-m":
        return _load_module(command[1], command[2:])
    path = os.path.abspath(command[0])
    sys.argv = list(command)
    _search_first(os.path.dirname(os.path.realpath(path)))
    names: dict[str, object] = {"__file__": path, "__builtins__": builtins, "__spec__": None, "__cached__": None}
    if sys.version_info < (3, 14):  # from there on it is computed when it is asked for
        names["__annotations__"] = {}
    main_module = ModuleType("__main__")
    main_module.__dict__.update(names, __loader__=SourceFileLoader("__main__", path))
    # Without what this file imports from __future__: it would make strings of the script's annotations.
    return main_module, compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _load_module(name: str, arguments: Sequence[str]) -> tuple[ModuleType, CodeType]:
    sys.argv = ["-m", *arguments]  # as Python has it while it looks for the module
    _search_first(os.getcwd())
    spec = _runnable_spec(name)
    assert spec.loader is not None
    code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if code is None:
        raise ImportError(f"no code object available for {spec.name}")
    sys.argv = [spec.origin or name, *arguments]
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __builtins__=builtins,
        __spec__=spec,
        __loader__=spec.loader,
        __package__=spec.parent,
    )
    return main_module, code


def _runnable_spec(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec


def _search_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def give_way(command: Sequence[str]) -> None:
    """Let `import distributed` find the user's own module of that name where `python` would find it.

    What is loaded of this package stays in use, but is no longer found by its name.
    """
    if command[0] == "-m" and command[1].partition(".")[0] == _OURS:
        return
    first = os.getcwd() if command[0] == "-m" else os.path.dirname(os.path.realpath(command[0]))
    spec = PathFinder.find_spec(_OURS, sys.path if sys.flags.safe_path else [first, *sys.path])
    if spec is None or spec.origin is None or spec.loader is None:  # a folder without __init__.py yields to a package
        return
    if os.path.exists(os.path.join(os.path.dirname(spec.origin), "launch", "node", "entry.py")):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == _OURS]:
        del sys.modules[name]


def set_title(words: Sequence[str]) -> None:
    """Show this command line in `ps`: it is written over the one that the process was started with, and cut there."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:  # another system: the title stays
        return
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything; two fields are before this part
    start, end = int(fields[_ARG_START - 2]), int(fields[_ARG_END - 2])
    if not 0 < start < end:
        return
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
