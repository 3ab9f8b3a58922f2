"""Outlining: a tree of torch's tensors as an Outline, and what of it this rank has to store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distributed.checkpoint.format.boxes import box_shape, fits
from distributed.checkpoint.format.layout import plan_chunks
from distributed.checkpoint.format.skeleton import free_name
from distributed.checkpoint.format.tensors import byte_size, check_dtype, dtype_name
from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.format.tree_spec import TreeSpec
from distributed.core.errors import CheckpointError
from distributed.runtime.tensor_shard import Box, TensorShard


def outline(tree: Mapping[str, Any], before: TreeSpec | None = None) -> tuple[TreeSpec, dict[str, torch.Tensor]]:
    """A tree's outline, and its tensors and boxes by name. The plans of the one `before` are taken over if they fit."""
    leaves, skeleton = flatten(dict(tree))
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, torch.Tensor] = {}
    boxes: dict[str, tuple[str, Box]] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, TensorShard):
            byte_size(name, leaf)  # refuses what cannot be stored
            tensors[name] = leaf
            continue
        check_shard(name, leaf)
        for number, (box, piece) in enumerate(leaf.pieces if leaf.stores else ()):
            label = free_name(f"{name}[{number}]", leaves)
            boxes[label], pieces[label] = (name, box), piece
    specs = {name: (dtype_name(leaf), tuple(leaf.shape)) for name, leaf in leaves.items()}
    if not all(isinstance(key, str) for key in tree):
        raise CheckpointError("the keys of a state must be texts", do="name its components: model, optimizer, …")
    split = frozenset(leaves.keys() - tensors.keys())
    if (
        before is not None
        and (before.split, before.boxes) == (split, boxes)
        and list(before.specs.items()) == list(specs.items())
    ):
        plans = before.plan, before.box_plan
    else:
        plans = tuple(plan_chunks(_sizes(tensors))), tuple(plan_chunks(_sizes(pieces)))
    return TreeSpec(skeleton, specs, plans[0], split, boxes, plans[1]), tensors | pieces


def check_shard(name: str, shard: TensorShard) -> None:
    """Raises unless its pieces are what it says."""
    check_dtype(name, shard)
    for box, piece in shard.pieces:
        byte_size(name, piece)
        if not fits(box, shard.shape) or tuple(piece.shape) != box_shape(box) or piece.dtype != shard.dtype:
            raise CheckpointError(
                f"a part of {name} does not fit: {piece.dtype} {list(piece.shape)} for {list(box)}",
                why=f"the whole is {shard.dtype} {list(shard.shape)}",
                do="give every box a tensor of its own shape, and of the type of the whole",
            )


def _sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: byte_size(name, tensor) for name, tensor in tensors.items()}
