"""Stages of a model: the blocks of each, and at which end of the blocks other modules are used."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from distributed.core.errors import PlanError
from distributed.strategies.model.blocks import main_stack
from distributed.strategies.model.paths import is_inside, join


def balance(costs: Sequence[float], parts: int) -> list[range]:
    """Contiguous, non-empty ranges of blocks with a minimal largest cost.

    >>> balance([1, 1, 1, 1, 4], 2)
    [range(0, 4), range(4, 5)]
    """
    assert 1 <= parts <= len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # for the first n blocks in k parts: the largest cost, the sum of squares (to be even), the bounds
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for part in range(1, parts + 1):
        last = len(costs) - (parts - part)
        best = {
            stop: min(
                (max(most, cost), squares + cost * cost, (*bounds, stop))
                for start, (most, squares, bounds) in best.items()
                if start < stop
                for cost in [before[stop] - before[start]]
            )
            for stop in range(part, last + 1)
        }
    bounds = best[len(costs)][2]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def cut(module: nn.Module, parts: int) -> list[list[str]]:
    """The paths of the blocks of each of `parts` stages, balanced by parameters.

    Modules before the blocks count for the first stage, modules after them for the last.

    >>> cut(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), 2)
    [['0', '1'], ['2', '3']]
    """
    stack = main_stack(module)
    if stack is None:
        raise PlanError(
            f"{type(module).__name__} has no stack of blocks that a pipeline could be cut in",
            why="stages are cut between the entries of an nn.ModuleList or nn.Sequential of one class",
            do="keep the model's repeated blocks in an nn.ModuleList, or set pipeline_parallel=1",
        )
    blocks = [join(stack, name) for name, _ in module.get_submodule(stack).named_children()]
    if len(blocks) < parts:
        raise PlanError(
            f"{parts} stages of a pipeline need {parts} blocks; {type(module).__name__} has {len(blocks)}",
            why=f"each stage has at least one entry of {stack or 'the model'!r}",
            do=f"use at most {len(blocks)} stages (interleaved and zero_bubble have two for each of pipeline_parallel)",
        )
    costs = [float(sum(p.numel() for p in module.get_submodule(path).parameters())) for path in blocks]
    sides = find_sides(module, stack)
    for path, owner in module.named_modules():
        side = side_of(path, sides)
        size = sum(p.numel() for p in owner.parameters(recurse=False))
        if side is not None:
            costs[0] += size if side.before else 0
            costs[-1] += size if side.after else 0
    return [[blocks[at] for at in part] for part in balance(costs, parts)]


@dataclass(frozen=True)
class Side:
    """Whether a module outside the blocks is used before them, after them, or both."""

    before: bool
    after: bool


def find_sides(module: nn.Module, stack: str) -> dict[str, Side]:
    """The sides of all modules and tensors beside the stack, by the forward that uses them.

    If the forward's source cannot be read, the order of modules decides; a wrong guess is an error later.
    """
    found: dict[str, Side] = {}
    owner, prefix = module, ""
    for part in stack.split(".") if stack else []:
        uses = _uses(owner)
        children = [name for name, _ in owner.named_children()]
        for name in children:
            if name == part:
                continue
            is_after = children.index(name) > children.index(part)
            side = Side(not is_after, is_after)
            if name in uses and part in uses:
                at = uses[part][-1]
                side = Side(uses[name][0] < at, uses[name][-1] > at)
            found[join(prefix, name)] = side
        owner, prefix = owner.get_submodule(part), join(prefix, part)
    return found


def _uses(owner: nn.Module) -> dict[str, list[tuple[int, int]]]:
    """Where the forward of a module uses each of its attributes, in order: a call comes after its arguments."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(owner).forward)))
    except (OSError, TypeError, SyntaxError):
        return {}
    uses: dict[str, list[tuple[int, int]]] = {}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            end = calls.get(id(node), node)
            uses.setdefault(node.attr, []).append((end.end_lineno or 0, end.end_col_offset or 0))
    return {name: sorted(places) for name, places in uses.items()}


def side_of(path: str, sides: dict[str, Side]) -> Side | None:
    return next((side for root, side in sides.items() if is_inside(path, root)), None)
