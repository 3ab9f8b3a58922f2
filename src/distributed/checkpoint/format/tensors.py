"""Torch's tensors as a checkpoint sees them: types, sizes, bytes and digests, and the memory they are read into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from distributed.checkpoint.format.digests import combine_blocks, combine_boxes, digest_bytes, digest_skeletons
from distributed.checkpoint.format.layout import CHUNK_BYTES, ITEM_BYTES, not_storable
from distributed.checkpoint.format.tree import flatten
from distributed.runtime.tensor_shard import Box, TensorShard

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def byte_size(name: str, tensor: torch.Tensor) -> int:
    """How many bytes a tensor takes in a checkpoint; raises for one that a checkpoint cannot hold."""
    check_dtype(name, tensor)
    if tensor.layout != torch.strided or tensor.is_meta or hasattr(tensor, "to_local"):
        raise not_storable(name, f"{type(tensor).__name__}: {tensor.layout}, on {tensor.device}")
    return tensor.numel() * tensor.element_size()


def check_dtype(name: str, tensor: torch.Tensor | TensorShard) -> None:
    """Raises for a type that a checkpoint cannot hold."""
    if tensor.dtype not in _NAMES:
        raise not_storable(name, f"{type(tensor).__name__}: {str(tensor.dtype).removeprefix('torch.')}")


def dtype_name(tensor: torch.Tensor | TensorShard) -> str:
    return _NAMES[tensor.dtype]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's bytes in row-major order, without a copy where it is contiguous."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


class TensorMemory:
    """Stored tensors become tensors, and their boxes shards."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        return tensor, as_bytes(tensor).numpy()

    def shard(self, shape: tuple[int, ...], dtype: str, pieces: tuple[tuple[Box, torch.Tensor], ...]) -> TensorShard:
        return TensorShard(shape, DTYPES[dtype], pieces)


def digest_tensor(tensor: torch.Tensor) -> str:
    """
    >>> digest_tensor(torch.zeros(3)) == digest_tensor(torch.zeros(3))
    True
    >>> digest_tensor(torch.zeros(3)) == digest_tensor(torch.zeros(3, dtype=torch.float64))
    False
    """
    return combine_blocks(dtype_name(tensor), tensor.shape, _digest_blocks(tensor))


def digest_components(tree: Mapping[str, Any]) -> dict[str, str]:
    """A digest for each top-level key: of its tensors' contents, types and shapes, its scalars and its structure.

    >>> digests = digest_components({"model": {"w": torch.ones(2)}, "progress": {"step": 3}})
    >>> sorted(digests), digests["progress"] == digest_components({"progress": {"step": 3}})["progress"]
    (['model', 'progress'], True)
    """
    tensors, skeleton = flatten(dict(tree))
    by_name = {
        name: _digest_shard(leaf) if isinstance(leaf, TensorShard) else digest_tensor(leaf)
        for name, leaf in tensors.items()
    }
    return digest_skeletons(skeleton, by_name)


def _digest_shard(shard: TensorShard) -> str:
    """Of what is here; that of the stored tensor where this is all of it."""
    pieces = sorted(((box, piece) for box, piece in shard.pieces if piece.numel()), key=lambda pair: pair[0])
    return combine_boxes(dtype_name(shard), shard.shape, [(box, _digest_blocks(piece)) for box, piece in pieces])


def _digest_blocks(tensor: torch.Tensor) -> list[str]:
    size = byte_size("tensor", tensor)
    data = as_bytes(tensor.detach().cpu()).numpy()
    return [digest_bytes(data[start : start + CHUNK_BYTES]) for start in range(0, size, CHUNK_BYTES)]
