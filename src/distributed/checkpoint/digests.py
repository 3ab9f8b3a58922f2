"""Digests of state: of bytes, of a tensor, and of every component of a tree, the same for a live tree and a stored one.

A tensor's digest is made from those of its blocks of 4 MiB, which are its chunks where it is large: so a save hashes
every byte once, and ranks that hold different blocks can put the digest together. That of a tensor in boxes is made
from these and their blocks: the same bytes have another one where they are cut otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from distributed.checkpoint.layout import CHUNK_BYTES, byte_size, dtype_name
from distributed.checkpoint.tree import flatten, replace_tensors
from distributed.runtime.portions import Box, Portion, whole_box


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


def combine_boxes(dtype: str, shape: Sequence[int], boxes: Sequence[tuple[Box, Sequence[str]]]) -> str:
    """The same of a tensor in boxes, from those that are not empty, in order; of one that is all of it, as above."""
    if not boxes or (len(boxes) == 1 and boxes[0][0] == whole_box(tuple(shape))):
        return combine_blocks(dtype, shape, boxes[0][1] if boxes else [])
    return digest_json([dtype, list(shape), [[box, list(blocks)] for box, blocks in boxes]])


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
        name: _digest_portion(leaf) if isinstance(leaf, Portion) else digest_tensor(leaf)
        for name, leaf in tensors.items()
    }
    return digest_skeletons(skeleton, by_name)


def digest_skeletons(skeleton: Mapping[str, Any], by_name: Mapping[str, str]) -> dict[str, str]:
    """The same from what is stored; whether tensors are tied makes no difference."""
    return {name: digest_json(replace_tensors(part, by_name)) for name, part in skeleton.items()}


def _digest_portion(portion: Portion) -> str:
    """Of what is here; that of the stored tensor where this is all of it."""
    pieces = sorted(((box, piece) for box, piece in portion.pieces if piece.numel()), key=lambda pair: pair[0])
    return combine_boxes(dtype_name(portion), portion.shape, [(box, _digest_blocks(piece)) for box, piece in pieces])


def _digest_blocks(tensor: torch.Tensor) -> list[str]:
    size = byte_size("tensor", tensor)
    data = as_bytes(tensor.detach().cpu()).numpy()
    return [digest_bytes(data[start : start + CHUNK_BYTES]) for start in range(0, size, CHUNK_BYTES)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's bytes in row-major order, without a copy where it is contiguous."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
