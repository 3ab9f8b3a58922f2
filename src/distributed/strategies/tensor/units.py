"""Units: an attention or a feed-forward network that is cut as one, recognised by its names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from distributed.core.errors import Problem
from distributed.strategies.checks.plain_modules import is_plain
from distributed.strategies.model.paths import is_inside, join, parent_of
from distributed.strategies.tensor.modules import (
    HEAD_COUNTS,
    Heads,
    core_of,
    features,
    find_number,
    fused_heads,
    separate_heads,
)
from distributed.strategies.tensor.names import (
    COLUMNS,
    FEED_FORWARD,
    FUSED,
    INTERLEAVED,
    OUTPUTS,
    OWN_PLAN,
    SEPARATE,
    Style,
)


@dataclass(frozen=True)
class Unit:
    """An attention or a feed-forward network that is cut as one."""

    styles: dict[str, Style]
    problems: tuple[Problem, ...] = ()


def find_unit(module: nn.Module, path: str, m: nn.Module) -> Unit | None:
    if isinstance(m, nn.MultiheadAttention):
        return _torch_attention(path, m)
    found = [unit for unit in (_attention(module, path, m), _feed_forward(path, m)) if unit is not None]
    if not found:
        return None
    styles = {at: style for unit in reversed(found) for at, style in unit.styles.items()}
    return Unit(styles, tuple(problem for unit in found for problem in unit.problems))


def heads_of(module: nn.Module, path: str, styles: Mapping[str, Style]) -> Heads | None:
    """The heads of the attention at a path, from its attributes and the widths of its layers."""
    parent = module.get_submodule(path)
    found = {name: core_of(child) for name, child in parent.named_children() if styles.get(join(path, name)) in COLUMNS}
    widths = {name: features(core)[1] for name, core in found.items() if core is not None}
    for name, width in widths.items():
        if styles[join(path, name)] == "fused_qkv_column" or name in INTERLEAVED:
            return fused_heads(parent, width)
    for names in SEPARATE:
        if all(name in widths for name in names):
            return separate_heads(parent, widths[names[0]], widths[names[1]])
    if find_number(parent, HEAD_COUNTS) is None or not widths:
        return None
    return separate_heads(parent, max(widths.values()), min(widths.values()))


def _torch_attention(path: str, m: nn.MultiheadAttention) -> Unit:
    if not is_plain(m, nn.MultiheadAttention):
        why = f"{type(m).__name__} has its own forward, which does not support a share of the heads"
        return Unit({}, (Problem(f"attention {path} has no tensor-parallel plan", why=why, do=OWN_PLAN),))
    if m.bias_k is not None or m.add_zero_attn:
        why = "add_bias_kv and add_zero_attn add keys, which cannot be sharded over ranks"
        return Unit({}, (Problem(f"attention {path} has no tensor-parallel plan", why=why, do=OWN_PLAN),))
    return Unit({path: "attention"})


def _attention(module: nn.Module, path: str, m: nn.Module) -> Unit | None:
    linears = _linears(m)
    names = next((names for names in SEPARATE if all(name in linears for name in names)), ())
    fused = next((name for name in (*FUSED, *INTERLEAVED) if name in linears), None)
    if names:
        inputs = dict.fromkeys(names, "column")
        heads = separate_heads(m, features(linears[names[0]])[1], features(linears[names[1]])[1])
    elif fused is not None:
        inputs = {fused: "column" if fused in INTERLEAVED else "fused_qkv_column"}
        heads = fused_heads(m, features(linears[fused])[1])
    else:
        return None
    if heads is None:
        problem = Problem(
            f"attention {path} ({type(m).__name__}) has no tensor-parallel plan",
            why=f"how many heads it has is not known: none of {', '.join(HEAD_COUNTS)} is an attribute of it that fits",
            do="keep the number of heads in self.num_heads and use it in forward",
        )
        return Unit({}, (problem,))
    outputs = [n for name in OUTPUTS for n in (name, f"{name}.0") if n in linears and n not in inputs]
    output = next((join(path, n) for n in outputs if features(linears[n])[0] == heads.parts[0]), None)
    output = output or _output_beside(module, path, heads)
    if output is None:
        problem = Problem(
            f"attention {path} ({type(m).__name__}) has no tensor-parallel plan",
            why=f"no linear layer with {heads.parts[0]} inputs is recognised as its output",
            do=OWN_PLAN,
        )
        return Unit({}, (problem,))
    styles = {path: "heads"} if path else {}
    styles |= {join(path, name): style for name, style in inputs.items()} | {output: "row"}
    more, problems = _beside_heads(path, m, heads, set(styles))
    return Unit(styles | more, problems)


def _beside_heads(
    path: str, m: nn.Module, heads: Heads, known: set[str]
) -> tuple[dict[str, Style], tuple[Problem, ...]]:
    """The styles of other modules with parameters in an attention: norms of single heads; others are problems."""
    styles: dict[str, Style] = {}
    problems = []
    is_block = _feed_forward(path, m) is not None or any(_feed_forward("", c) is not None for c in m.children())
    for name, child in m.named_children():
        sizes = {tuple(p.shape) for p in child.parameters()}
        at = join(path, name)
        if not sizes or at in known or any(is_inside(k, at) for k in known):
            continue
        if "norm" in name.lower() or name.startswith("ln"):
            if sizes <= {(heads.size,)}:
                styles[at] = "partial"
            elif re.search(r"(^|_)(q|k|query|key)(_|$)|^(q|k)(norm|ln)", name.lower()):
                problems.append(
                    Problem(
                        f"{at} has no tensor-parallel plan",
                        why=f"the layer normalises over all heads, of which a rank has some; one has {heads.size}",
                        do=OWN_PLAN,
                    )
                )
        elif not is_block:
            problems.append(_unknown_within(at, f"a {type(child).__name__}"))
    if not is_block:
        problems += [_unknown_within(join(path, name), "a parameter") for name, _ in m.named_parameters(recurse=False)]
    return styles, tuple(problems)


def _unknown_within(path: str, kind: str) -> Problem:
    why = f"{path} is {kind} in an attention whose heads are sharded; what of it belongs to a rank's heads is not known"
    return Problem(f"{path} has no tensor-parallel plan", why=why, do=OWN_PLAN)


def _output_beside(module: nn.Module, path: str, heads: Heads) -> str | None:
    """The output layer of an attention that is held by its parent, as in BERT."""
    if not path:
        return None
    parent = parent_of(path)
    beside = module.get_submodule(parent)
    for name in ("output.dense", *OUTPUTS):
        child = _below(beside, name)
        core = None if child is None else core_of(child)
        if core is not None and features(core)[0] == heads.parts[0]:
            return join(parent, name)
    return None


def _feed_forward(path: str, m: nn.Module) -> Unit | None:
    if isinstance(m, nn.Sequential):
        children = list(m.named_children())
        linears = [(name, core) for name, child in children if (core := core_of(child)) is not None]
        others = [child for _, child in children if core_of(child) is None]
        if len(linears) != 2 or any(next(child.parameters(), None) is not None for child in others):
            return None
        (first, _), (last, _) = linears
        style = _pair([linears[0][1]], linears[1][1])
        return Unit({join(path, first): style, join(path, last): "row"}) if style else None
    for columns, row in FEED_FORWARD:
        found = [core_of(child) for name in (*columns, row) if (child := _below(m, name)) is not None]
        cores = [core for core in found if core is not None]
        if len(cores) == len(columns) + 1 and (style := _pair(cores[:-1], cores[-1])):
            return Unit({join(path, name): style for name in columns} | {join(path, row): "row"})
    return None


def _pair(columns: list[nn.Module], row: nn.Module) -> Style:
    """The style of the columns if they fit before the row; empty if they do not."""
    width, hidden = features(row)[1], features(row)[0]
    if any(features(column)[0] != width for column in columns):
        return ""
    outputs = {features(column)[1] for column in columns}
    if outputs == {hidden}:
        return "column"
    return "fused_gate_column" if outputs == {2 * hidden} and len(columns) == 1 else ""


def _linears(m: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a module; a Sequential with one linear layer and no other parameters counts as it."""
    found = {}
    for name, child in m.named_children():
        core = core_of(child)
        if core is not None:
            found[name] = core
        elif isinstance(child, nn.Sequential) and len(child):
            first, *others = child.children()
            core = core_of(first)
            if core is not None and all(next(other.parameters(), None) is None for other in others):
                found[f"{name}.0"] = core
    return found


def _below(m: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        children = dict(m.named_children())
        if name not in children:
            return None
        m = children[name]
    return m
