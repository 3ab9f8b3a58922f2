"""Blocks: the repeated parts of a model, the units of sharding, recomputation, compilation and stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from distributed.core.errors import PlanError
from distributed.strategies.model.paths import fits


def find_blocks(module: nn.Module, wanted: Sequence[str] = ()) -> list[str]:
    """The paths of a model's blocks, in the order in which they are held.

    `wanted` names them instead: classes ("LlamaDecoderLayer") or paths ("encoder.layers.0", "encoder.layers.*").

    >>> find_blocks(nn.Sequential(nn.Linear(2, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])))
    ['1.0', '1.1', '1.2']
    """
    if wanted:
        return _named_blocks(module, wanted)
    stacks = [path for path in find_stacks(module) if not any(path.startswith(f"{o}.") for o in find_stacks(module))]
    return [f"{path}.{name}" if path else name for path in stacks for name, _ in _get(module, path).named_children()]


def need_blocks(module: nn.Module, wanted: Sequence[str], use: str, setting: str) -> list[str]:
    """The model's blocks for a setting that needs them; raises if there are none."""
    paths = find_blocks(module, wanted)
    if not paths:
        raise PlanError(
            f"the model has no blocks to {use}",
            why="the model holds no list of two or more modules of one class",
            do=f"name them with wrap_blocks, or set {setting}=false",
        )
    return paths


def find_stacks(module: nn.Module) -> list[str]:
    """The paths of lists of two or more blocks of one class, with parameters each.

    >>> find_stacks(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False))
    ['layers']
    """
    found = []
    for path, candidate in module.named_modules():
        children = list(candidate.children())
        alike = len({type(child) for child in children}) == 1
        is_list = isinstance(candidate, nn.ModuleList | nn.Sequential) and len(children) > 1
        if is_list and alike and all(next(child.parameters(), None) is not None for child in children):
            found.append(path)
    return found


def main_stack(module: nn.Module) -> str | None:
    """The stack with the most parameters: a pipeline is cut, and a sequence is sharded, in this one."""
    sizes = {path: sum(p.numel() for p in _get(module, path).parameters()) for path in find_stacks(module)}
    return max(sizes, key=lambda path: (sizes[path], -len(path))) if sizes else None


def _named_blocks(module: nn.Module, wanted: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in wanted:
        paths = [path for path, m in module.named_modules() if path and (type(m).__name__ == name or fits(path, name))]
        if not paths:
            classes = sorted({type(m).__name__ for path, m in module.named_modules() if path and list(m.children())})
            raise PlanError(
                f"wrap_blocks names {name!r}, which the model does not have",
                why=f"{name!r} is neither the class nor the path of one of the model's modules",
                do=f"choose among the classes {', '.join(classes[:8])}, or give a path such as 'layers.*'",
            )
        found += [path for path in paths if path not in found]
    order = {path: at for at, (path, _) in enumerate(module.named_modules())}
    return sorted(found, key=order.__getitem__)


def _get(module: nn.Module, path: str) -> nn.Module:
    return module.get_submodule(path) if path else module
