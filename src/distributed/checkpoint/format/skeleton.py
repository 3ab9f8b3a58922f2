"""A state tree as a JSON skeleton, with a reference in place of each tensor: what stands in a manifest."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

TENSOR = "__tensor__"
PAIRS = "__pairs__"  # a dict whose keys are not all strings, which JSON does not have
TUPLE = "__tuple__"
MARKS = (TENSOR, PAIRS, TUPLE)
SCALARS = (str, int, float, bool, type(None))
_MAX_DEPTH = 64


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
    marks = [mark for mark in MARKS if mark in skeleton]
    if not marks:
        for child in skeleton.values():
            check_skeleton(child, names, depth + 1)
        return
    value = skeleton[marks[0]]
    if len(skeleton) > 1:
        raise ValueError(f"{marks[0]} stands beside other keys")
    if marks[0] == TENSOR:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"the tree refers to the tensor {str(value)[:80]!r}, which is not listed")
        return
    if not isinstance(value, list):
        raise ValueError(f"{marks[0]} is not a list")
    if marks[0] == PAIRS and not all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], SCALARS) for pair in value
    ):
        raise ValueError(f"{PAIRS} is not a list of keys and values")
    for child in value:
        check_skeleton(child[1] if marks[0] == PAIRS else child, names, depth + 1)


def replace_tensors(skeleton: Any, by_name: Mapping[str, Any]) -> Any:
    """The skeleton with something else in place of each reference to a tensor."""
    if isinstance(skeleton, list):
        return [replace_tensors(child, by_name) for child in skeleton]
    if isinstance(skeleton, dict):
        if TENSOR in skeleton:
            return {TENSOR: by_name[skeleton[TENSOR]]}
        return {key: replace_tensors(child, by_name) for key, child in skeleton.items()}
    return skeleton


def unflatten(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(skeleton, dict):
        if TENSOR in skeleton:
            return tensors[skeleton[TENSOR]]
        if PAIRS in skeleton:
            return {key: unflatten(child, tensors) for key, child in skeleton[PAIRS]}
        if TUPLE in skeleton:
            return tuple(unflatten(child, tensors) for child in skeleton[TUPLE])
        return {key: unflatten(child, tensors) for key, child in skeleton.items()}
    if isinstance(skeleton, list):
        return [unflatten(child, tensors) for child in skeleton]
    return skeleton
