"""Tensor-parallel styles: which modules of a model are cut between ranks, and how, found by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from distributed.core.errors import PlanError, Problem
from distributed.strategies.blocks import find_blocks, main_stack
from distributed.strategies.tensor_modules import (
    HEAD_COUNTS,
    Heads,
    core_of,
    features,
    find_number,
    fused_heads,
    is_lora,
    separate_heads,
)

Style = str
STYLES: dict[Style, str] = {
    "column": "a linear layer cut by its outputs",
    "row": "a linear layer cut by its inputs, whose outputs are summed",
    "column_gather": "a linear layer cut by its outputs, which are gathered",
    "fused_qkv_column": "query, key and value in one linear layer, one after the other, each cut by its outputs",
    "fused_gate_column": "gate and up projection in one linear layer, one after the other, each cut by its outputs",
    "vocabulary": "an embedding cut by its rows",
    "attention": "an nn.MultiheadAttention cut by its heads",
    "heads": "a module that has its share of the heads, by its attributes",
    "partial": "a whole module that sees only a share of the heads, so that its gradients are summed",
}
COLUMNS = ("column", "fused_qkv_column", "fused_gate_column")

_SEPARATE = (
    *(
        tuple(pattern.format(x) for x in "qkv")
        for pattern in ("{}_proj", "w{}", "{}", "to_{}", "{}_lin", "w_{}", "W_{}")
    ),
    *(tuple(pattern.format(x) for x in "qkv") for pattern in ("W{}", "{}_linear", "linear_{}", "proj_{}", "fc_{}")),
    *(tuple(pattern.format(x) for x in ("query", "key", "value")) for pattern in ("{}", "{}_proj", "{}_layer")),
    ("queries", "keys", "values"),
)
_FUSED = ("qkv", "c_attn", "in_proj", "Wqkv", "wqkv", "qkv_proj", "to_qkv", "w_qkv", "W_qkv", "attn_qkv", "qkv_linear")
_INTERLEAVED = ("query_key_value",)  # for each head its query, key and value
_OUTPUTS = (
    *("o_proj", "out_proj", "proj", "c_proj", "wo", "o", "to_out", "w_o", "W_o", "Wo", "out", "out_lin", "proj_o"),
    *("output_proj", "out_linear", "linear_out", "proj_out", "fc_o", "fc_out", "resid_proj", "dense", "output", "fc"),
    *("projection", "attn_proj", "linear"),
)
_FEED_FORWARD: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("w1", "w3"), "w2"),
    (("w1", "w2"), "w3"),
    (("w1",), "w2"),
    (("w12",), "w3"),
    (("fc_1", "fc_2"), "proj"),
    (("fc1", "fc2"), "fc3"),
    (("fc1",), "fc2"),
    (("fc_1",), "fc_2"),
    (("c_fc",), "c_proj"),
    (("linear1",), "linear2"),
    (("linear_1",), "linear_2"),
    (("lin1",), "lin2"),
    (("dense1",), "dense2"),
    (("ff1",), "ff2"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("w_in",), "w_out"),
    (("intermediate.dense",), "output.dense"),
    (("fc",), "proj"),
)


@dataclass(frozen=True)
class _Unit:
    """An attention or a feed-forward network that is cut as one."""

    styles: dict[str, Style]
    problems: tuple[Problem, ...] = ()


def find_styles(module: nn.Module, degree: int) -> dict[str, Style]:
    """The style of each module that is cut between `degree` ranks, by path; what is not in it stays whole.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> find_styles(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 2)["layers.1.linear2"]
    'row'
    """
    blocks = find_blocks(module)
    units = {path: unit for path, m in _searched(module, blocks) if (unit := _find_unit(module, path, m)) is not None}
    stack = main_stack(module)
    problems = [problem for unit in units.values() for problem in unit.problems]
    problems += [
        Problem(
            f"block {path} ({type(module.get_submodule(path)).__name__}) has no tensor-parallel plan",
            why="neither an attention nor a feed-forward network is recognised in it by its names and shapes",
            do=_OWN_PLAN,
        )
        for path in blocks
        if stack is not None and _is_in(path, stack) and not any(_is_in(unit, path) for unit in units)
    ]
    if not units and not problems:
        problems.append(
            Problem(
                f"{type(module).__name__} has no tensor-parallel plan",
                why="no block with an attention or a feed-forward network is recognised in it",
                do=_OWN_PLAN,
            )
        )
    styles: dict[str, Style] = {}
    for unit in units.values():
        styles.update({path: style for path, style in unit.styles.items() if path not in styles})
    if not problems:
        problems += _indivisible(module, styles, degree)
    if problems:
        raise PlanError(_once_per_pattern(problems))
    return styles | _vocabulary(module, blocks, degree)


_OWN_PLAN = (
    "give tensor_parallel_plan={path pattern: style}, such as {'layers.*.mlp.up': 'column', 'layers.*.mlp.down': 'row'}"
    f"; styles are {', '.join(STYLES)}"
)


def styles_from(plan: Mapping[str, str], module: nn.Module, degree: int) -> dict[str, Style]:
    """A plan of the user's: patterns of paths, where * is any one part, with their styles.

    >>> styles_from({"*.up": "column", "*.down": "row"}, nn.ModuleList([nn.ModuleDict(
    ...     {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})]), 2)
    {'0.up': 'column', '0.down': 'row'}
    """
    styles: dict[str, Style] = {}
    problems = []
    for pattern, style in plan.items():
        paths = [path for path, _ in module.named_modules() if path and _fits(path, pattern)]
        if style not in STYLES:
            known = "; ".join(f"{name}: {meaning}" for name, meaning in STYLES.items())
            problems.append(Problem(f"tensor_parallel_plan gives {pattern} the unknown style {style!r}", do=known))
        elif not paths:
            known = ", ".join(
                dict.fromkeys(_pattern(path) for path, m in module.named_modules() if core_of(m) is not None)
            )
            problems.append(
                Problem(
                    f"tensor_parallel_plan names {pattern!r}, which fits no module",
                    why="a pattern has as many parts as the path, each its name or *",
                    do=f"linear layers are at {known or 'no path: the model has none'}",
                )
            )
        else:
            wrong = [path for path in paths if not _suits(style, module.get_submodule(path))]
            problems += [
                Problem(
                    f"tensor_parallel_plan gives {path} the style {style!r}, which does not suit it",
                    why=f"it is a {type(module.get_submodule(path)).__name__}; {style!r} is {STYLES[style]}",
                )
                for path in wrong
            ]
            styles.update(dict.fromkeys(paths, style))
    if not problems:
        for path in [path for path, style in styles.items() if style in ("column", "fused_qkv_column")]:
            parent = _parent(path)
            if parent not in styles and heads_of(module, parent, styles) is not None:
                styles[parent] = "heads"
        problems = _indivisible(module, styles, degree)
    if problems:
        raise PlanError(_once_per_pattern(problems))
    return styles


def heads_of(module: nn.Module, path: str, styles: Mapping[str, Style]) -> Heads | None:
    """The heads of the attention at a path, from its attributes and the widths of its layers."""
    parent = module.get_submodule(path)
    found = {
        name: core_of(child) for name, child in parent.named_children() if styles.get(_join(path, name)) in COLUMNS
    }
    widths = {name: features(core)[1] for name, core in found.items() if core is not None}
    for name, width in widths.items():
        if styles[_join(path, name)] == "fused_qkv_column" or name in _INTERLEAVED:
            return fused_heads(parent, width)
    for names in _SEPARATE:
        if all(name in widths for name in names):
            return separate_heads(parent, widths[names[0]], widths[names[1]])
    if find_number(parent, HEAD_COUNTS) is None or not widths:
        return None
    return separate_heads(parent, max(widths.values()), min(widths.values()))


def _searched(module: nn.Module, blocks: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    for path, m in module.named_modules():
        if not blocks or any(_is_in(path, block) for block in blocks):
            yield path, m


def _find_unit(module: nn.Module, path: str, m: nn.Module) -> _Unit | None:
    if isinstance(m, nn.MultiheadAttention):
        return _torch_attention(path, m)
    found = [unit for unit in (_attention(module, path, m), _feed_forward(path, m)) if unit is not None]
    if not found:
        return None
    styles = {at: style for unit in reversed(found) for at, style in unit.styles.items()}
    return _Unit(styles, tuple(problem for unit in found for problem in unit.problems))


def _torch_attention(path: str, m: nn.MultiheadAttention) -> _Unit:
    if m.bias_k is not None or m.add_zero_attn:
        why = "add_bias_kv and add_zero_attn add keys of their own, which are not shared out"
        return _Unit({}, (Problem(f"attention {path} has no tensor-parallel plan", why=why, do=_OWN_PLAN),))
    return _Unit({path: "attention"})


def _attention(module: nn.Module, path: str, m: nn.Module) -> _Unit | None:
    linears = _linears(m)
    names = next((names for names in _SEPARATE if all(name in linears for name in names)), ())
    fused = next((name for name in (*_FUSED, *_INTERLEAVED) if name in linears), None)
    if names:
        inputs = dict.fromkeys(names, "column")
        heads = separate_heads(m, features(linears[names[0]])[1], features(linears[names[1]])[1])
    elif fused is not None:
        inputs = {fused: "column" if fused in _INTERLEAVED else "fused_qkv_column"}
        heads = fused_heads(m, features(linears[fused])[1])
    else:
        return None
    if heads is None:
        problem = Problem(
            f"attention {path} ({type(m).__name__}) has no tensor-parallel plan",
            why=f"how many heads it has is not known: none of {', '.join(HEAD_COUNTS)} is an attribute of it that fits",
            do="keep the number of heads in self.num_heads and use it in forward",
        )
        return _Unit({}, (problem,))
    outputs = [n for name in _OUTPUTS for n in (name, f"{name}.0") if n in linears and n not in inputs]
    output = next((_join(path, n) for n in outputs if features(linears[n])[0] == heads.parts[0]), None)
    output = output or _output_beside(module, path, heads)
    if output is None:
        problem = Problem(
            f"attention {path} ({type(m).__name__}) has no tensor-parallel plan",
            why=f"no linear layer with {heads.parts[0]} inputs is recognised as its output",
            do=_OWN_PLAN,
        )
        return _Unit({}, (problem,))
    styles = {path: "heads"} if path else {}
    styles |= {_join(path, name): style for name, style in inputs.items()} | {output: "row"}
    more, problems = _beside_heads(path, m, heads, set(styles))
    return _Unit(styles | more, problems)


def _beside_heads(
    path: str, m: nn.Module, heads: Heads, known: set[str]
) -> tuple[dict[str, Style], tuple[Problem, ...]]:
    """What else with parameters is in an attention: norms of single heads, and what has no place there."""
    styles: dict[str, Style] = {}
    problems = []
    is_block = _feed_forward(path, m) is not None or any(_feed_forward("", c) is not None for c in m.children())
    for name, child in m.named_children():
        sizes = {tuple(p.shape) for p in child.parameters()}
        at = _join(path, name)
        if not sizes or at in known or any(_is_in(k, at) for k in known):
            continue
        if "norm" in name.lower() or name.startswith("ln"):
            if sizes <= {(heads.size,)}:
                styles[at] = "partial"
            elif re.search(r"(^|_)(q|k|query|key)(_|$)|^(q|k)(norm|ln)", name.lower()):
                problems.append(
                    Problem(
                        f"{at} has no tensor-parallel plan",
                        why=f"it normalises over all heads, of which a rank has a share; one head has {heads.size}",
                        do=_OWN_PLAN,
                    )
                )
        elif not is_block:
            problems.append(_unknown_within(at, f"a {type(child).__name__}"))
    if not is_block:
        problems += [_unknown_within(_join(path, name), "a parameter") for name, _ in m.named_parameters(recurse=False)]
    return styles, tuple(problems)


def _unknown_within(path: str, kind: str) -> Problem:
    why = f"it is {kind} within an attention whose heads are shared out; which share of it belongs to them is not known"
    return Problem(f"{path} has no tensor-parallel plan", why=why, do=_OWN_PLAN)


def _output_beside(module: nn.Module, path: str, heads: Heads) -> str | None:
    """The output of an attention that its parent holds, as BERT has it."""
    if not path:
        return None
    parent = _parent(path)
    beside = module.get_submodule(parent)
    for name in ("output.dense", *_OUTPUTS):
        child = _below(beside, name)
        core = None if child is None else core_of(child)
        if core is not None and features(core)[0] == heads.parts[0]:
            return _join(parent, name)
    return None


def _feed_forward(path: str, m: nn.Module) -> _Unit | None:
    if isinstance(m, nn.Sequential):
        children = list(m.named_children())
        linears = [(name, core) for name, child in children if (core := core_of(child)) is not None]
        others = [child for _, child in children if core_of(child) is None]
        if len(linears) != 2 or any(next(child.parameters(), None) is not None for child in others):
            return None
        (first, _), (last, _) = linears
        style = _pair([linears[0][1]], linears[1][1])
        return _Unit({_join(path, first): style, _join(path, last): "row"}) if style else None
    for columns, row in _FEED_FORWARD:
        found = [core_of(child) for name in (*columns, row) if (child := _below(m, name)) is not None]
        cores = [core for core in found if core is not None]
        if len(cores) == len(columns) + 1 and (style := _pair(cores[:-1], cores[-1])):
            return _Unit({_join(path, name): style for name in columns} | {_join(path, row): "row"})
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


def _vocabulary(module: nn.Module, blocks: list[str], degree: int) -> dict[str, Style]:
    """Embeddings and the heads as large as them, where both are outside of the blocks and divide."""
    outside = [(path, m) for path, m in module.named_modules() if not any(_is_in(path, block) for block in blocks)]
    embeddings = {path: m for path, m in outside if type(m) is nn.Embedding and _can_be_cut(m)}
    heads = {
        path: m
        for path, m in outside
        if isinstance(m, nn.Linear)
        and core_of(m) is m
        and any(features(m) == (e.embedding_dim, e.num_embeddings) for e in embeddings.values())
    }
    sizes = {m.weight.shape[0] for m in heads.values()}
    paired = {path: m for path, m in embeddings.items() if m.num_embeddings in sizes}
    if not heads or any(size % degree for size in sizes) or _tied_elsewhere(module, {**heads, **paired}):
        return {}
    return dict.fromkeys(paired, "vocabulary") | dict.fromkeys(heads, "column_gather")


def _can_be_cut(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _tied_elsewhere(module: nn.Module, cut: Mapping[str, nn.Module]) -> bool:
    """Whether a weight that is to be cut is also a weight of another module, which has no style."""
    weights = {id(m.weight) for m in cut.values()}
    return any(
        id(p) in weights and not any(_is_in(name, path) for path in cut)
        for name, p in module.named_parameters(remove_duplicate=False)
    )


def _indivisible(module: nn.Module, styles: Mapping[str, Style], degree: int) -> list[Problem]:
    problems = []
    for path, style in styles.items():
        m = module.get_submodule(path)
        core = core_of(m)
        sizes: dict[str, int] = {}
        if style == "attention":
            assert isinstance(m, nn.MultiheadAttention)
            sizes["heads"] = m.num_heads
        elif style == "heads":
            heads = heads_of(module, path, styles)
            if heads is None:
                problems.append(Problem(f"{path} has the style 'heads', but how many it has is not known"))
                continue
            sizes["heads"] = heads.queries
            if heads.keys != heads.queries:
                sizes["key and value heads"] = heads.keys
        elif style == "row" and core is not None:
            sizes["inputs"] = features(core)[0]
        elif style == "fused_gate_column" and core is not None:
            sizes["outputs of each half"] = features(core)[1] // 2
        elif style == "vocabulary":
            sizes["rows"] = int(m.weight.shape[0])  # type: ignore[arg-type,union-attr,index]
        elif core is not None and style in ("column", "column_gather"):
            sizes["outputs"] = features(core)[1]
        if is_lora(m) and len(getattr(m, "lora_magnitude_vector", ())):
            problems.append(
                Problem(f"{path} has DoRA weights, which have no tensor-parallel plan", do="use plain LoRA")
            )
        if is_lora(m) and style == "row" and any(b.bias is not None for b in m.lora_B.values()):  # type: ignore
            problems.append(Problem(f"{path} has LoRA biases, which have no tensor-parallel plan", do="use plain LoRA"))
        problems += [
            Problem(
                f"{path} has {size} {what}, which do not divide by a tensor-parallel degree of {degree}",
                do=f"choose a degree among {_divisors(size)}",
            )
            for what, size in sizes.items()
            if size % degree
        ]
    covered = {path for path, style in styles.items() if style == "heads"}
    about_heads = {problem.what.split(" has ")[0] for problem in problems} & covered
    return [p for p in problems if _parent(p.what.split(" has ")[0]) not in about_heads]  # layers follow their heads


def _divisors(size: int) -> str:
    return ", ".join(str(d) for d in range(1, min(size, 256) + 1) if size % d == 0)


def _suits(style: Style, m: nn.Module) -> bool:
    if style == "attention":
        return isinstance(m, nn.MultiheadAttention) and m.bias_k is None and not m.add_zero_attn
    if style == "vocabulary":
        return type(m) is nn.Embedding and _can_be_cut(m)
    return style in ("heads", "partial") or core_of(m) is not None


def _linears(m: nn.Module) -> dict[str, nn.Module]:
    """The linear layers that a module holds; a sequence of one and of what has no parameters counts as it."""
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


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _fits(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", part) for part, w in zip(parts, wanted, strict=True))


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _once_per_pattern(problems: Iterable[Problem]) -> list[Problem]:
    """Without those that say the same of another layer of a stack."""
    return list({re.sub(r"(?<=[.\s])\d+(?=\.)", "*", problem.what): problem for problem in problems}.values())
