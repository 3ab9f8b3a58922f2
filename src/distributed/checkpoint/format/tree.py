"""A state tree as named tensors and a JSON skeleton, so that it can be stored without pickle."""

from __future__ import annotations

from typing import Any

import torch

from distributed.checkpoint.format.skeleton import MARKS, PAIRS, SCALARS, TENSOR, TUPLE, free_name
from distributed.core.errors import CheckpointError
from distributed.runtime.tensor_shard import TensorShard


def flatten(tree: Any, path: str = "") -> tuple[dict[str, Any], Any]:
    """The tensors and shards by path, and the tree with a reference in place of each; each is stored once.

    >>> tensors, skeleton = flatten({"w": torch.ones(2), "step": 3, "state": {0: {"m": torch.zeros(1)}}})
    >>> sorted(tensors), skeleton["step"]
    (['state/0/m', 'w'], 3)
    """
    tensors: dict[str, torch.Tensor | TensorShard] = {}
    names: dict[tuple[Any, ...], str] = {}
    return tensors, _flatten(tree, path, tensors, names)


def _flatten(
    tree: Any, path: str, tensors: dict[str, torch.Tensor | TensorShard], names: dict[tuple[Any, ...], str]
) -> Any:
    if isinstance(tree, torch.Tensor | TensorShard):
        identity = _identity(tree)
        if identity not in names:
            names[identity] = free_name(path, tensors)
            tensors[names[identity]] = tree
        return {TENSOR: names[identity]}
    if isinstance(tree, dict):
        children = {
            key: _flatten(value, f"{path}/{key}" if path else str(key), tensors, names) for key, value in tree.items()
        }
        if all(isinstance(key, str) and key not in MARKS for key in tree):
            return children
        return {PAIRS: [[key, child] for key, child in children.items()]}
    if isinstance(tree, list | tuple):
        items = [_flatten(value, f"{path}/{i}" if path else str(i), tensors, names) for i, value in enumerate(tree)]
        return {TUPLE: items} if isinstance(tree, tuple) else items
    if isinstance(tree, SCALARS):
        return tree
    raise CheckpointError(
        f"the state at {path!r} is a {type(tree).__name__}, which a checkpoint cannot hold",
        why="checkpoints hold tensors, numbers and texts only, so that loading one can run no code",
        do="let its state_dict() return these",
    )


def _identity(tensor: torch.Tensor | TensorShard) -> tuple[Any, ...]:
    """Equal for two tensors that are the same elements of the same memory; a shard may have none here."""
    if isinstance(tensor, TensorShard) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return (id(tensor),)
    view = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)
