"""Names of modules and functions that stand in strings, which no type checker and no import follows, are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import distributed
from distributed.core.engines.engine import ENGINES, Engine

SOURCE = Path(distributed.__file__).parent
MLFLOW_TAGS = {"distributed.decisions", "distributed.run_dir", "distributed.status"}
TARGET = re.compile(r"distributed(\.\w+)+(:\w+)?")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def file_of(module: str) -> Path | None:
    """The file of a module of ours, or the `__init__.py` of a package."""
    place = SOURCE.joinpath(*module.split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


def names_in(path: Path) -> set[str]:
    """What a module defines or imports at its top, without running it: some need packages that are not here."""
    found: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return found


def is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@cache
def targets() -> frozenset[str]:
    """Every string in our sources that is the name of a module of ours, or of something in it."""
    constants = (node for path in SOURCE.rglob("*.py") for node in ast.walk(tree_of(path)) if is_text(node))
    found = {node.value for node in constants if TARGET.fullmatch(node.value)}  # type: ignore[attr-defined]
    return frozenset(found - MLFLOW_TAGS)


def programs() -> set[str]:
    """Modules that follow "-m" in a command."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            words = node.elts if isinstance(node, ast.Tuple | ast.List) else []
            for flag, name in pairwise(words):
                if is_text(flag) and is_text(name) and flag.value == "-m":  # type: ignore[attr-defined]
                    found.add(name.value)  # type: ignore[attr-defined]
    return {name for name in found if TARGET.fullmatch(name)}


def hooks() -> Iterator[str]:
    """What the engines declare as "module:name"."""
    for engine in ENGINES.entries.values():
        for holder in (engine, *([engine.launcher] if engine.launcher else [])):
            yield from (value for value in vars(holder).values() if isinstance(value, str) and ":" in value)


def test_engine_target_exists() -> None:
    gone = []
    for target in targets():
        module, _, name = target.partition(":")
        path = file_of(module)
        if path is None or (name and name not in names_in(path)):
            gone.append(target)
    assert not gone


def test_module_started_with_dash_m_can_be_run() -> None:
    found = programs()
    assert "distributed.worker" in found
    for module in found:
        path = file_of(f"{module}.__main__") or file_of(module)
        assert path is not None, module
        assert path.stem == "__main__" or '__name__ == "__main__"' in path.read_text(encoding="utf-8"), module


@pytest.mark.parametrize("name", sorted(distributed._PUBLIC))
def test_public_name_is_defined_where_the_table_says(name: str) -> None:
    path = file_of(distributed._PUBLIC[name])
    assert path is not None
    assert name in names_in(path)


def test_every_engine_hook_is_among_the_checked_targets() -> None:
    found = set(hooks())
    assert "distributed.launch.local:LocalLauncher" in found
    assert found <= targets()


def test_missing_engine_target_is_detected() -> None:
    gone = Engine("distributed.engines.gone:Engine", plans="distributed.core.engines.engine:gone")
    assert file_of(gone.target.partition(":")[0]) is None
    path = file_of("distributed.core.engines.engine")
    assert path is not None
    assert "gone" not in names_in(path)
    assert {"Engine", "ENGINES", "load_target", "features"} <= names_in(path)


def engine_names() -> set[str]:
    """Of the engines that are not torch's own, and of the launchers that they bring."""
    others = {name: engine for name, engine in ENGINES.entries.items() if engine.needs}
    return {*others, *(engine.launcher.name for engine in others.values() if engine.launcher)}


def words_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name, attribute, keyword and string of a module, docstrings too, with its line."""
    for node in ast.walk(tree):
        if is_text(node):
            yield node.lineno, node.value  # type: ignore[attr-defined]
        for field in ("id", "attr", "name", "arg", "module"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield getattr(node, "lineno", 0), word


ABOUT_AN_ENGINE = re.compile(rf"(?<![A-Za-z])(?i:{'|'.join(engine_names())})(?![a-z])")


@pytest.mark.parametrize(
    "code", ["def ray(): ...", '"what Ray writes"', "x.deepspeed_config", "import horovod.torch", "f(TensorFlow=1)"]
)
def test_engine_name_is_found_in_any_word(code: str) -> None:
    assert any(ABOUT_AN_ENGINE.search(word) for _, word in words_of(ast.parse(code)))
    assert not ABOUT_AN_ENGINE.search("array, an arrays_of")


def test_core_planner_and_worker_name_no_engine() -> None:
    paths = [*SOURCE.glob("core/**/*.py"), *SOURCE.glob("planner/**/*.py"), SOURCE / "worker.py"]
    of_settings = SOURCE / "core" / "settings"  # users see one list of settings, also those that one engine has
    found = [
        f"{path.relative_to(SOURCE)}:{line} {word}"
        for path in paths
        if of_settings not in path.parents
        for line, word in words_of(tree_of(path))
        if ABOUT_AN_ENGINE.search(word)
    ]
    assert not found, "an engine's words belong into engines/<name>:\n" + "\n".join(found)


def test_no_lower_layer_compares_engine_names() -> None:
    names = engine_names()
    above = {"engines", "trainers", "tune", "bench", "chaos", "cli"}
    below = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in above]
    found = []
    for path in below:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare):
                said = {text.value for text in ast.walk(node) if is_text(text)}  # type: ignore[attr-defined]
                found += [f"{path}:{node.lineno} {name}" for name in said & names]
    assert not found
