"""Checkpoints of numpy's arrays, for states that no tensor of torch is in: the same format, written by one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distributed.checkpoint.format.layout import ITEM_BYTES, ChunkPlan, not_storable, plan_chunks
from distributed.checkpoint.format.skeleton import TENSOR, free_name
from distributed.checkpoint.format.tree_spec import TreeSpec
from distributed.checkpoint.save.publishing import Bytes
from distributed.checkpoint.save.saver import StateTree
from distributed.core.errors import CheckpointError
from distributed.runtime.tensor_shard import Box

Array = np.ndarray[Any, Any]


def flatten_arrays(tree: Any, arrays: dict[str, Array], path: str = "") -> Any:
    """The tree as a skeleton; its arrays go by their paths into `arrays`.

    >>> found: dict[str, Array] = {}
    >>> flatten_arrays({"model": {"dense/kernel": np.ones(2)}, "step": 3}, found), sorted(found)
    ({'model': {'dense/kernel': {'__tensor__': 'model/dense/kernel'}}, 'step': 3}, ['model/dense/kernel'])
    """
    if isinstance(tree, np.ndarray):
        name = free_name(path, arrays)
        arrays[name] = tree
        return {TENSOR: name}
    if isinstance(tree, dict) and all(isinstance(key, str) and not key.startswith("__") for key in tree):
        return {key: flatten_arrays(child, arrays, f"{path}/{key}" if path else key) for key, child in tree.items()}
    if isinstance(tree, list):
        return [flatten_arrays(child, arrays, f"{path}/{number}") for number, child in enumerate(tree)]
    if isinstance(tree, str | int | float | bool | None):
        return tree
    raise CheckpointError(
        f"the state at {path!r} is a {type(tree).__name__}, which a checkpoint cannot hold",
        why="checkpoints hold arrays, numbers and texts only, so that loading one can run no code",
        do="convert it to arrays, numbers or texts",
    )


class ArrayStaging:
    """Arrays are copied one by one: a save holds the state once more in host memory while it is written."""

    def __init__(self, frameworks: Mapping[str, str]) -> None:
        self.frameworks = frameworks

    def outline(self, tree: StateTree, before: TreeSpec | None) -> tuple[TreeSpec, Mapping[str, Array]]:
        arrays: dict[str, Array] = {}
        skeleton = flatten_arrays(tree, arrays)
        for name, array in arrays.items():
            if ITEM_BYTES.get(array.dtype.name) != array.itemsize or not array.dtype.isnative:
                raise not_storable(name, f"numpy {array.dtype}")
        specs = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
        if before is not None and list(before.specs.items()) == list(specs.items()):
            return TreeSpec(skeleton, specs, before.plan), arrays
        return TreeSpec(skeleton, specs, tuple(plan_chunks({n: a.nbytes for n, a in arrays.items()}))), arrays

    def reserve(self, lengths: Iterable[int]) -> None:
        """Nothing: memory is taken when it is needed."""

    def clear(self) -> None:
        """Nothing is kept."""

    def copy(self, plan: Iterable[ChunkPlan], leaves: Mapping[str, Array]) -> list[tuple[ChunkPlan, Bytes]]:
        flat: dict[str, Bytes] = {}
        copied = []
        for chunk in plan:
            content = np.empty(chunk.length, np.uint8)
            for byte_range in chunk.ranges:
                if byte_range.tensor not in flat:
                    flat[byte_range.tensor] = np.ascontiguousarray(leaves[byte_range.tensor]).reshape(-1).view(np.uint8)
                source = flat[byte_range.tensor][byte_range.start : byte_range.start + byte_range.length]
                content[byte_range.offset : byte_range.offset + byte_range.length] = source
            copied.append((chunk, content))
        return copied


class ArrayMemory:
    """Stored tensors become arrays; the types that numpy itself does not have are ml_dtypes'."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Array, Bytes]:
        array = np.empty(shape, np.dtype(dtype))
        return array, array.reshape(-1).view(np.uint8)

    def shard(self, shape: tuple[int, ...], dtype: str, pieces: tuple[tuple[Box, Any], ...]) -> Any:
        raise NotImplementedError("arrays are read whole")


class LoneWriter:
    """Who writes a checkpoint where one process holds all of the state: the ranks of a world of one."""

    rank, world_size, is_main, store = 0, 1, True, None

    def number(self) -> int:
        return 0

    def share_text(self, key: str, text: str | None) -> str:
        assert text is not None, key
        return text
