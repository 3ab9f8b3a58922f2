"""Tensor-parallel styles: which modules of a model are cut between ranks, and how, found by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from distributed.core.errors import PlanError, Problem
from distributed.strategies.checks.plain_modules import is_plain
from distributed.strategies.model.blocks import find_blocks, main_stack
from distributed.strategies.model.paths import fits, is_inside, parent_of, pattern_of
from distributed.strategies.tensor.modules import core_of, features, is_lora
from distributed.strategies.tensor.names import OWN_PLAN, STYLES, Style
from distributed.strategies.tensor.units import find_unit, heads_of


def find_styles(module: nn.Module, degree: int) -> dict[str, Style]:
    """The style of each module that is cut between `degree` ranks, by path; other modules stay whole.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> find_styles(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 2)["layers.1.linear2"]
    'row'
    """
    blocks = find_blocks(module)
    units = {path: unit for path, m in _searched(module, blocks) if (unit := find_unit(module, path, m)) is not None}
    stack = main_stack(module)
    problems = [problem for unit in units.values() for problem in unit.problems]
    problems += [
        Problem(
            f"block {path} ({type(module.get_submodule(path)).__name__}) has no tensor-parallel plan",
            why="neither an attention nor a feed-forward network is recognised in it by its names and shapes",
            do=OWN_PLAN,
        )
        for path in blocks
        if stack is not None and is_inside(path, stack) and not any(is_inside(unit, path) for unit in units)
    ]
    if not units and not problems:
        problems.append(
            Problem(
                f"{type(module).__name__} has no tensor-parallel plan",
                why="no block with an attention or a feed-forward network is recognised in it",
                do=OWN_PLAN,
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


def styles_from(plan: Mapping[str, str], module: nn.Module, degree: int) -> dict[str, Style]:
    """The styles of a user's plan: patterns of paths, where * is any one part, with their styles.

    >>> styles_from({"*.up": "column", "*.down": "row"}, nn.ModuleList([nn.ModuleDict(
    ...     {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})]), 2)
    {'0.up': 'column', '0.down': 'row'}
    """
    styles: dict[str, Style] = {}
    problems = []
    for pattern, style in plan.items():
        paths = [path for path, _ in module.named_modules() if path and fits(path, pattern)]
        if style not in STYLES:
            known = "; ".join(f"{name}: {meaning}" for name, meaning in STYLES.items())
            problems.append(Problem(f"tensor_parallel_plan gives {pattern} the unknown style {style!r}", do=known))
        elif not paths:
            known = ", ".join(
                dict.fromkeys(pattern_of(path) for path, m in module.named_modules() if core_of(m) is not None)
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
                    why=f"{path} is a {type(module.get_submodule(path)).__name__}; {style!r} is {STYLES[style]}",
                )
                for path in wrong
            ]
            styles.update(dict.fromkeys(paths, style))
    if not problems:
        for path in [path for path, style in styles.items() if style in ("column", "fused_qkv_column")]:
            parent = parent_of(path)
            if parent not in styles and heads_of(module, parent, styles) is not None:
                styles[parent] = "heads"
        problems = _indivisible(module, styles, degree)
    if problems:
        raise PlanError(_once_per_pattern(problems))
    return styles


def _searched(module: nn.Module, blocks: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    for path, m in module.named_modules():
        if not blocks or any(is_inside(path, block) for block in blocks):
            yield path, m


def _vocabulary(module: nn.Module, blocks: list[str], degree: int) -> dict[str, Style]:
    """The styles of embeddings and output layers of the same size, if both are outside of the blocks and divide."""
    outside = [(path, m) for path, m in module.named_modules() if not any(is_inside(path, block) for block in blocks)]
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
    """Whether a weight that is to be cut is tied to a module without a style."""
    weights = {id(m.weight) for m in cut.values()}
    return any(
        id(p) in weights and not any(is_inside(name, path) for path in cut)
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
                problems.append(Problem(f"{path} has the style 'heads', but its number of heads is not known"))
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
    return [p for p in problems if parent_of(p.what.split(" has ")[0]) not in about_heads]  # layers follow their heads


def _divisors(size: int) -> str:
    return ", ".join(str(d) for d in range(1, min(size, 256) + 1) if size % d == 0)


def _suits(style: Style, m: nn.Module) -> bool:
    if style == "attention":
        return is_plain(m, nn.MultiheadAttention) and m.bias_k is None and not m.add_zero_attn
    if style == "vocabulary":
        return type(m) is nn.Embedding and _can_be_cut(m)
    return style in ("heads", "partial") or core_of(m) is not None


def _once_per_pattern(problems: Iterable[Problem]) -> list[Problem]:
    """The problems without those that repeat for other layers of a stack."""
    return list({re.sub(r"(?<=[.\s])\d+(?=\.)", "*", problem.what): problem for problem in problems}.values())
