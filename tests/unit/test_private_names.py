"""Private names of other libraries are used in one place each, so that a new version is tried there first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import distributed

PACKAGE = Path(distributed.__file__).parent
READS_NAMES = ("getattr", "hasattr", "setattr", "delattr")

NAMEDTUPLE = "public, of a NamedTuple: it begins with _ lest a field has its name"
MODULE = "what nn.Module keeps its tensors and children in; modules outside torch rely on it too"
KERAS = "Keras and tf.data have no public name for it"
RAY = "Ray has no public name for it"
SWAPPED = "DeepSpeed's own way to states that it holds on a disk"
ALLOWED = {  # by the beginning of a path
    "": dict.fromkeys(("_fields", "_replace"), NAMEDTUPLE)
    | dict.fromkeys(("_parameters", "_buffers", "_modules"), MODULE)
    | {"_exit": "public: os._exit", "_version": "a tensor's count of writes, read per parameter and step"},
    "adapters/lightning/module_log.py": {"_forward_cache": "torchmetrics has no public name for a call's own value"},
    "core/protocol/gpu_memory.py": {"_dump_snapshot": "core imports no torch; without it, a picture is not written"},
    "core/settings/step.py": {"_param_dict": "DeepSpeed's own config object, which a user passes"},
    "core/documents/typed_json.py": {"_typeshed": "for type checkers alone"},
    "data/loading/dali.py": {"_auto_reset": "DALI's iterator says nowhere else whether it is reset"},
    "engines/deepspeed/flats.py": dict.fromkeys(
        (
            "_hp_mapping",
            "_hp_optimizer_states_linked",
            "_optimizer_states_and_gradient_swap_in",
            "_optimizer_states_and_gradient_swap_out",
            "_reassign_or_swap_out_partitioned_parameters",
            "_release_swap_buffers",
            "_swappable_optimizer_subgroup",
        ),
        SWAPPED,
    ),
    "engines/horovod/engine.py": {"_requires_update": "by which a wrapped optimizer is told from a plain one"},
    "engines/ray/": dict.fromkeys(("_in_tune_session", "_internal", "_private"), RAY)
    | dict.fromkeys(("_internal_kv_del", "_internal_kv_get", "_internal_kv_list", "_internal_kv_put"), RAY),
    "engines/tensorflow/input/": dict.fromkeys(
        ("_VariantDataset", "_batch_size", "_input_dataset", "_variant_tensor"), KERAS
    ),
    "engines/tensorflow/model/": dict.fromkeys(
        (
            "_built",
            "_compile_loss",
            "_compile_metrics",
            "_distribute_strategy",
            "_distribution_strategy",
            "_flatten_layers",
            "_get_own_losses",
            "_is_compiled",
            "_learning_rate",
            "_lookup_layer",
            "_symbolic_build",
            "_token_start_index",
            "_user_loss",
            "_user_loss_weights",
            "_user_losses",
            "_user_metrics",
            "_user_weighted_metrics",
        ),
        KERAS,
    ),
    "engines/tensorflow/step.py": {"_all_reduce_sum_gradients": KERAS},
    "launch/node/exit/gloo_threads.py": {"_pg_map": "without it a script may hang at its end"},
    "launch/node/exit/leaving.py": dict.fromkeys(("_run_exitfuncs", "_shutdown"), "CPython's end of a fork"),
    "train/whole_set/torch_metrics.py": {
        "_reductions": "torchmetrics has no public name for how states are merged",
        "_update_count": "nor for a metric that goes on with a state",
    },
}
ONE_PLACE = ("runtime/torch_compat.py", "runtime/torch_module_compat.py")


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines: functions, classes, fields, and attributes that a class sets on itself."""
    nodes = list(ast.walk(tree))
    found = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    found |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and of_self(n) and isinstance(n.ctx, ast.Store)
    }


def of_self(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Those of other libraries, as an attribute, in an import, or by a string."""
    own = own_names(tree) - ALLOWED[""].keys()
    for node in ast.walk(tree):
        names: list[object] = []
        if isinstance(node, ast.Attribute) and not of_self(node):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in READS_NAMES:
            names = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        yield from (str(name) for name in names if is_private(name) and name not in own)


def place_of(file: str, name: str) -> str:
    """The entry that allows it; itself if there is none."""
    return next((f"{start}:{name}" for start in ALLOWED if file.startswith(start) and name in ALLOWED[start]), file)


def test_private_names_stand_in_torch_compat_or_the_list() -> None:
    found, refused = set(), set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for name in private_names(ast.parse(path.read_text())) if file not in ONE_PLACE else ():
            place = place_of(file, name)
            (refused if place == file else found).add(f"{file}:{name}" if place == file else place)
    assert refused == set(), "put it behind a function of runtime/torch_compat.py, or say in ALLOWED why not"
    assert {f"{start}:{name}" for start, names in ALLOWED.items() for name in names} - found == set(), "not used now"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("optimizer._step_hooks.values()", ["_step_hooks"]),
        ("torch._foreach_add_(x, y)", ["_foreach_add_"]),
        ("from torch._C import _fft", ["_C", "_fft"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("getattr(tensor, '_hooks', None)", ["_hooks"]),
        ("self._mine, super()._mine(), x.__dict__, getattr(x, name)", []),
        ("class A:\n    def _mine(self, other): return other._mine()", []),
    ],
)
def test_private_names_of_others_are_detected(code: str, names: list[str]) -> None:
    assert list(private_names(ast.parse(code))) == names
