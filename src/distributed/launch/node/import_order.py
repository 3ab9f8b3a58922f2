"""In which order a program imports packages and changes the environment, by its source; nothing of it runs.

The program's own modules, beside it or on the path but not installed, are read where they are imported.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import PathFinder

_MOST_FILES = 100  # parsing one takes milliseconds
_WRITES = {"setdefault", "update", "pop", "clear", "__setitem__"}
_RUN_ANYTHING = {"load_dotenv", "exec", "run_path", "run_module"}
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class Import:
    """An import of a package, "" for a relative one; `is_sure`: it is not in a function or branch."""

    package: str
    is_sure: bool


@dataclass(frozen=True)
class Write:
    """A line that changes the environment; `name` is "" where only the run knows it."""

    file: str
    line: int
    name: str


Event = Import | Write


def read_events(path: str, tree: ast.Module, installed: Iterable[str] = ()) -> list[Event]:
    """The events of a program in the order of its lines; modules with the names `installed` are not looked for."""
    folder = os.path.dirname(os.path.realpath(path))
    roots = [folder, *(found for found in map(os.path.abspath, sys.path) if not _is_installed(found))]
    return list(_Reader(roots, frozenset(installed)).events(path, tree, folder))


def imported(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            yield statement.module


def _is_installed(path: str) -> bool:
    return any(folder in path for folder in _INSTALLED)


@dataclass
class _Reader:
    roots: list[str]
    installed: frozenset[str]
    read: set[str] = field(default_factory=set)

    def events(self, path: str, tree: ast.Module, package: str) -> Iterator[Event]:
        """Of one file; `package`: the folder that `from . import x` means in it."""
        sure = {id(statement) for statement in tree.body}
        aliases = _aliases(tree)
        nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
        for node in sorted(nodes, key=lambda node: node.lineno):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._import(node, package, id(node) in sure)
            for name in _written(node, aliases):
                yield Write(os.path.basename(path), node.lineno, name)

    def _import(self, node: ast.Import | ast.ImportFrom, package: str, is_sure: bool) -> Iterator[Event]:
        if isinstance(node, ast.Import):
            places = [(alias.name, alias.name, self.roots) for alias in node.names]
        else:
            for _ in range(node.level - 1):
                package = os.path.dirname(package)
            roots, base = ([package] if node.level else self.roots), node.module or ""
            top = "" if node.level else base
            places = [(top, ".".join(filter(None, (base, alias.name))), roots) for alias in node.names]
        for top, name, roots in places:
            yield Import(top.partition(".")[0], is_sure)
            if is_sure:
                yield from self._module(name.split("."), roots)

    def _module(self, parts: list[str], roots: list[str]) -> Iterator[Event]:
        """The events of a module of the program's own, and of the packages around it."""
        if parts[0] in self.installed or parts[0] in sys.stdlib_module_names:
            return
        for part in parts:
            spec = PathFinder.find_spec(part, roots)
            if spec is None:
                return
            if spec.origin is not None and spec.origin.endswith(".py") and not _is_installed(spec.origin):
                yield from self._file(spec.origin)
            if not spec.submodule_search_locations:
                return
            roots = list(spec.submodule_search_locations)

    def _file(self, path: str) -> Iterator[Event]:
        if path in self.read or len(self.read) >= _MOST_FILES:
            return
        self.read.add(path)
        tree = parse(path)
        if tree is not None:
            yield from self.events(path, tree, os.path.dirname(path))


def parse(path: str | os.PathLike[str]) -> ast.Module | None:
    """None where Python could not read it either; the rank says why."""
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _aliases(tree: ast.Module) -> frozenset[str]:
    """The names of os.environ in a file."""
    found = {"environ"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found |= {alias.asname for alias in node.names if alias.name == "environ" and alias.asname}
        elif isinstance(node, ast.Assign) and _is_environ(node.value, frozenset(found)):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def _written(node: ast.AST, aliases: frozenset[str]) -> list[str]:
    """The variables that a line changes."""
    if isinstance(node, ast.AugAssign) and _is_environ(node.target, aliases):  # os.environ |= …
        return [_text(key) for key in node.value.keys] if isinstance(node.value, ast.Dict) else [""]
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        return [
            _text(target.slice)
            for target in targets
            if isinstance(target, ast.Subscript) and _is_environ(target.value, aliases)
        ]
    return _written_by_call(node, aliases) if isinstance(node, ast.Call) else []


def _written_by_call(call: ast.Call, aliases: frozenset[str]) -> list[str]:
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called in _RUN_ANYTHING:
        return [""]
    if called in ("putenv", "unsetenv"):
        return [_text(call.args[0]) if call.args else ""]
    if not (isinstance(function, ast.Attribute) and called in _WRITES and _is_environ(function.value, aliases)):
        return []
    if called == "update":
        names = [keyword.arg or "" for keyword in call.keywords]
        for argument in call.args:
            names += [_text(key) for key in argument.keys] if isinstance(argument, ast.Dict) else [""]
        return names
    return [_text(call.args[0]) if call.args else ""]


def _is_environ(node: ast.expr, aliases: frozenset[str]) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in aliases


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
