"""Digests of state: of bytes, of a tensor, and of every component of a tree, the same for a live tree and a stored one.

A tensor's digest is made from those of its blocks of 4 MiB, which are its chunks where it is large: so a save hashes
every byte once, and ranks that hold different blocks can put the digest together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from distributed.checkpoint.layout import CHUNK_BYTES, byte_size, dtype_name
from distributed.checkpoint.tree import flatten, replace_tensors


def digest_bytes(data: Any) -> str:
    """BLAKE3 as 64 hex digits."""
    return blake3(data).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with one spelling, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_json(value: Any) -> str:
    return digest_bytes(canonical(value))


def combine_blocks(dtype: str, shape: Sequence[int], blocks: Sequence[str]) -> str:
    """A tensor's digest from its type, shape and the digests of its blocks in order."""
    return digest_json([dtype, list(shape), list(blocks)])


def digest_tensor(tensor: torch.Tensor) -> str:
    """
    >>> digest_tensor(torch.zeros(3)) == digest_tensor(torch.zeros(3))
    True
    >>> digest_tensor(torch.zeros(3)) == digest_tensor(torch.zeros(3, dtype=torch.float64))
    False
    """
    size = byte_size("tensor", tensor)
    data = as_bytes(tensor.detach().cpu()).numpy()
    blocks = [digest_bytes(data[start : start + CHUNK_BYTES]) for start in range(0, size, CHUNK_BYTES)]
    return combine_blocks(dtype_name(tensor), tensor.shape, blocks)


def digest_components(tree: Mapping[str, Any]) -> dict[str, str]:
    """A digest for each top-level key: of its tensors' contents, types and shapes, its scalars and its structure.

    >>> digests = digest_components({"model": {"w": torch.ones(2)}, "progress": {"step": 3}})
    >>> sorted(digests), digests["progress"] == digest_components({"progress": {"step": 3}})["progress"]
    (['model', 'progress'], True)
    """
    tensors, skeleton = flatten(dict(tree))
    return digest_skeletons(skeleton, {name: digest_tensor(tensor) for name, tensor in tensors.items()})


def digest_skeletons(skeleton: Mapping[str, Any], by_name: Mapping[str, str]) -> dict[str, str]:
    """The same from what is stored; whether tensors are tied makes no difference."""
    return {name: digest_json(replace_tensors(part, by_name)) for name, part in skeleton.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's bytes in row-major order, without a copy where it is contiguous."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
