"""A state tree as named tensors and a JSON skeleton, so that it can be stored without pickle."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from distributed.core.errors import CheckpointError
from distributed.runtime.portions import Portion

_TENSOR = "__tensor__"
_PAIRS = "__pairs__"  # a dict whose keys are not all strings, which JSON does not have
_TUPLE = "__tuple__"
_MAX_DEPTH = 64
_MARKS = (_TENSOR, _PAIRS, _TUPLE)
_SCALARS = (str, int, float, bool, type(None))


def flatten(tree: Any, path: str = "") -> tuple[dict[str, Any], Any]:
    """The tensors and portions by path, and the tree with a reference in place of each; one met twice is stored once.

    >>> tensors, skeleton = flatten({"w": torch.ones(2), "step": 3, "state": {0: {"m": torch.zeros(1)}}})
    >>> sorted(tensors), skeleton["step"]
    (['state/0/m', 'w'], 3)
    """
    tensors: dict[str, torch.Tensor | Portion] = {}
    names: dict[tuple[Any, ...], str] = {}
    return tensors, _flatten(tree, path, tensors, names)


def _flatten(
    tree: Any, path: str, tensors: dict[str, torch.Tensor | Portion], names: dict[tuple[Any, ...], str]
) -> Any:
    if isinstance(tree, torch.Tensor | Portion):
        identity = _identity(tree)
        if identity not in names:
            names[identity] = free_name(path, tensors)
            tensors[names[identity]] = tree
        return {_TENSOR: names[identity]}
    if isinstance(tree, dict):
        children = {
            key: _flatten(value, f"{path}/{key}" if path else str(key), tensors, names) for key, value in tree.items()
        }
        if all(isinstance(key, str) and key not in _MARKS for key in tree):
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


def _identity(tensor: torch.Tensor | Portion) -> tuple[Any, ...]:
    """Equal for two tensors that are the same elements of the same memory; a portion may have none here."""
    if isinstance(tensor, Portion) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return (id(tensor),)
    view = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


def free_name(path: str, taken: Container[str]) -> str:
    """{"a/b": …} and {"a": {"b": …}} have the same path and are not the same tensor."""
    name, number = path, 1
    while name in taken:
        name, number = f"{path}~{number}", number + 1
    return name


def check_skeleton(skeleton: Any, names: Container[str], depth: int = 0) -> None:
    """Raises ValueError unless `unflatten` can build a tree from it with the tensors of these names."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"the tree is nested deeper than {_MAX_DEPTH}")
    if isinstance(skeleton, list):
        for child in skeleton:
            check_skeleton(child, names, depth + 1)
        return
    if not isinstance(skeleton, dict):
        return
    marks = [mark for mark in _MARKS if mark in skeleton]
    if not marks:
        for child in skeleton.values():
            check_skeleton(child, names, depth + 1)
        return
    value = skeleton[marks[0]]
    if len(skeleton) > 1:
        raise ValueError(f"{marks[0]} stands beside other keys")
    if marks[0] == _TENSOR:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"the tree refers to the tensor {str(value)[:80]!r}, which is not listed")
        return
    if not isinstance(value, list):
        raise ValueError(f"{marks[0]} is not a list")
    if marks[0] == _PAIRS and not all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], _SCALARS) for pair in value
    ):
        raise ValueError(f"{_PAIRS} is not a list of keys and values")
    for child in value:
        check_skeleton(child[1] if marks[0] == _PAIRS else child, names, depth + 1)


def replace_tensors(skeleton: Any, by_name: Mapping[str, Any]) -> Any:
    """The skeleton with something else in place of each reference to a tensor."""
    if isinstance(skeleton, list):
        return [replace_tensors(child, by_name) for child in skeleton]
    if isinstance(skeleton, dict):
        if _TENSOR in skeleton:
            return {_TENSOR: by_name[skeleton[_TENSOR]]}
        return {key: replace_tensors(child, by_name) for key, child in skeleton.items()}
    return skeleton


def unflatten(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
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
