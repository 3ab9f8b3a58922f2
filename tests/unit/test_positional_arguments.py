"""What has many arguments takes them by name: a reader of a call need not count commas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import distributed

PACKAGE = Path(distributed.__file__).parent
MOST_TAKEN, MOST_PASSED = 5, 6
BY_NAME = ("cli/", "bench/throughput/command.py")  # typer calls these functions, and always by name

TORCH = "torch calls it, in place of its own function of this signature"
TENSORFLOW = "a strategy of TensorFlow's hands arguments on by position"
TAKEN = {
    "engines/tensorflow/step.py:_gradients": TENSORFLOW,
    "engines/tensorflow/step.py:_run_last": TENSORFLOW,
    "engines/tensorflow/step.py:_run_micro": TENSORFLOW,
    "engines/tensorflow/step.py:_summed_gradients": TENSORFLOW,
    "strategies/context/attention.py:attend": TORCH,
    "strategies/data_parallel/batchnorm.py:forward": TORCH,
    "strategies/data_parallel/whole_batch.py:batch_norm": TORCH,
    "strategies/data_parallel/whole_batch.py:instance_norm": TORCH,
    "strategies/tensor/torch_attention.py:__call__": TORCH,
}
PASSED = {
    "bench/scaling/script.py:nn.Sequential": "layers in a row",
    "bench/workloads/networks.py:nn.Sequential": "layers in a row",
    "chaos/disk.py:_run": "the words of a command",
    "chaos/hosts.py:_run": "the words of a command",
    "engines/tensorflow/step.py:self._last": TENSORFLOW,
    "strategies/context/attention.py:torch.backends.cuda.SDPAParams": "it takes no names",
    "strategies/data_parallel/batchnorm.py:_Normalize.apply": "it takes no names",
    "strategies/data_parallel/whole_batch.py:own": "torch's own function, called as it was",
    "tune/results/screen.py:table.add_row": "the cells of a row",
}


def takes_too_many(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            own = names[:1] and names[0] in ("self", "cls", "ctx")
            if len(names) - bool(own) > MOST_TAKEN:
                yield node.name


def passes_too_many(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > MOST_PASSED:
            yield ast.unparse(node.func)


def in_package() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def test_functions_take_at_most_five_positional_arguments() -> None:
    found = {
        f"{file}:{name}" for file, tree in in_package() if not file.startswith(BY_NAME) for name in takes_too_many(tree)
    }
    assert found - TAKEN.keys() == set(), "put a `*` before those that are not plain from the call"
    assert TAKEN.keys() - found == set(), "they take fewer now"


def test_calls_pass_at_most_six_positional_arguments() -> None:
    found = {f"{file}:{name}" for file, tree in in_package() for name in passes_too_many(tree)}
    assert found - PASSED.keys() == set(), "name the arguments"
    assert PASSED.keys() - found == set(), "they pass fewer now"


@pytest.mark.parametrize(
    ("code", "taken", "passed"),
    [
        ("def f(a, b, c, d, e, g): ...", ["f"], []),
        ("class A:\n    def f(self, a, b, c, d, e): ...", [], []),
        ("def f(a, b, *, c, d, e, g): ...", [], []),
        ("f(1, 2, 3, 4, 5, 6, 7)", [], ["f"]),
        ("x.f(1, 2, 3, 4, 5, 6, seven=7)", [], []),
    ],
)
def test_too_many_positional_arguments_are_detected(code: str, taken: list[str], passed: list[str]) -> None:
    tree = ast.parse(code)
    assert (list(takes_too_many(tree)), list(passes_too_many(tree))) == (taken, passed)
