"""Every collective that ranks wait in during a run has a name, by which a hang or a failure in it is reported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import distributed

PACKAGE = Path(distributed.__file__).parent
FOLDERS = ("comm", "engines", "strategies", "train")
NAMING = ("named", "reported")  # the session's scopes of a name
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_coalesced", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
}  # fmt: skip

COMPILED = "a model or its blocks are compiled with it, and a compiler cannot follow the report of a name"
UNNAMED = {
    "strategies/context/attention.py:_GatherSum.backward": COMPILED,
    "strategies/context/attention.py:_gather": COMPILED,
    "strategies/data_parallel/batchnorm.py:_sum": COMPILED,
    "strategies/data_parallel/whole_batch.py:WholeBatch._average": COMPILED,
    "strategies/data_parallel/whole_batch.py:WholeBatch._embedding_renorm.embedding_renorm_": COMPILED,
    "strategies/pipeline/schedule.py:": "only its signature is looked at",
    "strategies/tensor/collectives.py:": COMPILED,
    "strategies/tensor/collectives.py:_all_reduce": COMPILED,
    "engines/horovod/trainer.py:HorovodTrainer.metric_average": "users call it outside of fit; it names its errors",
    "train/stragglers/links.py:Links._echo": "within the name that `probe` gives",
    "train/stragglers/links.py:Links._round_trip": "within the name that `probe` gives",
}


def unnamed_in(tree: ast.AST, place: tuple[str, ...] = (), is_named: bool = False) -> Iterator[tuple[str, str]]:
    """The functions, and the collectives that they use outside of any name; a function begins without one."""
    if isinstance(tree, ast.FunctionDef | ast.ClassDef):
        place, is_named = (*place, tree.name), False
    if isinstance(tree, ast.With):
        calls = [item.context_expr for item in tree.items if isinstance(item.context_expr, ast.Call)]
        is_named = is_named or any(isinstance(c.func, ast.Attribute) and c.func.attr in NAMING for c in calls)
    used = _collective(tree)
    if used and not is_named:
        yield ".".join(place), used
    for child in ast.iter_child_nodes(tree):
        yield from unnamed_in(child, place, is_named)


def _collective(node: ast.AST) -> str:
    """The collective that is called, handed on, or imported by its bare name; "" for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
        return node.attr if node.attr in COLLECTIVES else ""
    if isinstance(node, ast.Name) and node.id == "broadcast_coalesced":
        return node.id
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
        return next((alias.name for alias in node.names if alias.name in COLLECTIVES), "")
    return ""


def unnamed_in_package() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in (path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))):
        for place, used in unnamed_in(ast.parse(path.read_text())):
            found.setdefault(f"{path.relative_to(PACKAGE).as_posix()}:{place}", []).append(used)
    return found


def test_all_collectives_but_the_listed_ones_are_named() -> None:
    found = unnamed_in_package()
    assert {place: used for place, used in found.items() if place not in UNNAMED} == {}
    assert [place for place in UNNAMED if place not in found] == [], "they are named now, or gone"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f():\n    dist.all_reduce(x)", [("f", "all_reduce")]),
        ("def f():\n    with session.named('sum'):\n        dist.all_reduce(x)", []),
        ("with session.named('sum'):\n    def f():\n        dist.all_reduce(x)", [("f", "all_reduce")]),
        ("def f():\n    with torch.no_grad():\n        works = [dist.recv]", [("f", "recv")]),
        ("from torch.distributed import broadcast", [("", "broadcast")]),
        ("def f():\n    return dist.get_rank()", []),
    ],
)
def test_unnamed_collective_is_detected(code: str, expected: list[tuple[str, str]]) -> None:
    assert list(unnamed_in(ast.parse(code))) == expected
