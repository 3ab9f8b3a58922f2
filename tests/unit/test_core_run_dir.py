"""The names of the run directory: each is written once, in core/run_dir.py, and found again by whoever reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import distributed
from distributed.core.run_dir import AttemptDir, RunDir

SOURCES = Path(distributed.__file__).parent
RUN, ATTEMPT = RunDir("run"), AttemptDir("attempt")
FILES = [
    *(RUN.config, RUN.plan, RUN.events, RUN.history, RUN.launch, RUN.resize, RUN.lock, RUN.join_token, RUN.mlflow),
    *(RUN.payload("7", ".pt"), RUN.ledger.file(7), RUN.worker_count(7), ATTEMPT.parent_log, ATTEMPT.resumed),
    *(ATTEMPT.ended, ATTEMPT.log(7), ATTEMPT.heartbeat(7), ATTEMPT.failure(7), ATTEMPT.stack(7), ATTEMPT.lost(7)),
    *(ATTEMPT.collectives(7), ATTEMPT.memory(7), ATTEMPT.place(7)),
]
FOLDERS = [RUN.checkpoints, RUN.tensorboard, RUN.ledger.path, RUN.attempts, RUN.worker_count(7).parent]  # words, too
PATTERN = re.compile("|".join(re.escape(path.name).replace("7", r"(\*|\d+)") for path in FILES))
WORDS = re.compile("|".join(re.escape(path.name.partition("7")[0]) for path in [*FILES, *FOLDERS]))


def test_only_run_dir_module_names_files_of_a_run() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    del sources[SOURCES / "core" / "run_dir.py"]
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}: {text}"
        for path, source in sources.items()
        if WORDS.search(source)  # reading all of them takes long
        for node, text in literals(ast.parse(source))
        if names_a_file(text) or getattr(node, "in_path", False)
    ]
    assert not found, "ask distributed.core.run_dir for them:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        'Path(run_dir, "events.jsonl")',
        'f"{run_dir}/attempts/{n}/rank-{rank}.log"',
        'folder.glob("heartbeat-*")',
        'os.path.join(run_dir, "tensorboard")',
        'run_dir / "checkpoints"',
        'f"failure-{rank}.json"',
    ],
)
def test_run_file_name_is_found_in_any_expression(code: str) -> None:
    found = list(literals(ast.parse(code)))
    assert any(names_a_file(text) or getattr(node, "in_path", False) for node, text in found)


def literals(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Every text in a module but prose; what an f-string puts in is a star."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        for part in path_parts(node):
            part.in_path = part.value in {folder.name for folder in FOLDERS}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node, "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node, node.value


def path_parts(node: ast.AST) -> list[ast.Constant]:
    """The texts that a path is made of here: `a / "b"`, `Path(a, "b")`, `os.path.join(a, "b")`."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts = [node.right]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Path", "os.path.join"):
        parts = node.args
    return [part for part in parts if isinstance(part, ast.Constant)]


def names_a_file(text: str) -> bool:
    if "\n" in text or " " in text:
        return False
    return any(PATTERN.fullmatch(part) for part in text.split("/"))


def test_attempts_are_listed_by_number(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.attempt_numbers() == []
    for number in (10, 9, 0):
        run.attempt(number).path.mkdir(parents=True)
    (run.attempts / "notes").mkdir()
    assert run.attempt_numbers() == [0, 9, 10]


def test_files_of_ranks_are_listed_by_attempt(tmp_path: Path) -> None:
    attempt, other = RunDir(tmp_path).attempt(0), RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    assert not attempt.has_failures()
    for path in (attempt.heartbeat(2), attempt.heartbeat(11), attempt.failure(2), attempt.log(2)):
        path.touch()
    assert attempt.heartbeats() == {2: attempt.heartbeat(2), 11: attempt.heartbeat(11)}
    assert attempt.has_failures()
    assert attempt.logs() == [attempt.log(2)]
    assert not other.has_failures()
    assert other.heartbeats() == {}


def test_later_fits_have_separate_folders(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in (2, 10, 3):
        run.fit(number).path.mkdir()
    (tmp_path / "fit-me").mkdir()
    assert [fit.fit_number for fit in run.fits()] == [1, 2, 3, 10]
    assert run.fits()[0] == run
