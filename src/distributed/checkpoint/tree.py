"""A state tree as named tensors and a JSON skeleton, so that it can be stored without pickle."""

from __future__ import annotations

from typing import Any

import torch

from distributed.core.errors import CheckpointError

_TENSOR = "__tensor__"
_PAIRS = "__pairs__"  # a dict whose keys are not all strings, which JSON does not have
_TUPLE = "__tuple__"
_SCALARS = (str, int, float, bool, type(None))


def flatten(tree: Any, path: str = "") -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors by path, and the tree with a reference in place of each; a tensor met twice is stored once.

    >>> tensors, skeleton = flatten({"w": torch.ones(2), "step": 3, "state": {0: {"m": torch.zeros(1)}}})
    >>> sorted(tensors), skeleton["step"]
    (['state/0/m', 'w'], 3)
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}
    return tensors, _flatten(tree, path, tensors, names)


def _flatten(tree: Any, path: str, tensors: dict[str, torch.Tensor], names: dict[tuple[Any, ...], str]) -> Any:
    if isinstance(tree, torch.Tensor):
        identity = (
            (tree.device, tree.data_ptr(), tree.shape, tree.stride(), tree.dtype) if tree.numel() else (id(tree),)
        )
        name = names.setdefault(identity, path)
        if name == path:
            tensors[path] = tree
        return {_TENSOR: name}
    if isinstance(tree, dict):
        children = {
            key: _flatten(value, f"{path}/{key}" if path else str(key), tensors, names) for key, value in tree.items()
        }
        if all(isinstance(key, str) for key in tree):
            return children
        return {_PAIRS: [[key, child] for key, child in children.items()]}
    if isinstance(tree, list | tuple):
        items = [_flatten(value, f"{path}/{i}" if path else str(i), tensors, names) for i, value in enumerate(tree)]
        return {_TUPLE: items} if isinstance(tree, tuple) else items
    if isinstance(tree, _SCALARS):
        return tree
    raise CheckpointError(
        f"the state at {path!r} is a {type(tree).__name__}, which a checkpoint cannot hold",
        why="checkpoints hold tensors, numbers and texts only, so that loading one can run no code",
        do="let its state_dict() return these",
    )


def unflatten(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(skeleton, dict):
        if _TENSOR in skeleton:
            return tensors[skeleton[_TENSOR]]
        if _PAIRS in skeleton:
            return {key: unflatten(child, tensors) for key, child in skeleton[_PAIRS]}
        if _TUPLE in skeleton:
            return tuple(unflatten(child, tensors) for child in skeleton[_TUPLE])
        return {key: unflatten(child, tensors) for key, child in skeleton.items()}
    if isinstance(skeleton, list):
        return [unflatten(child, tensors) for child in skeleton]
    return skeleton
