"""Digests of state: of bytes, of a tensor's blocks put together, and of every component of a tree.

A tensor's digest is made from those of its blocks of 4 MiB, which are its chunks where it is large: so a save hashes
every byte once, and ranks that hold different blocks can put the digest together. That of a tensor in boxes is made
from these and their blocks: the same bytes have another one where they are cut otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from distributed.checkpoint.format.skeleton import replace_tensors
from distributed.runtime.tensor_shard import Box, whole_box


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


def digest_skeletons(skeleton: Mapping[str, Any], by_name: Mapping[str, str]) -> dict[str, str]:
    """A digest for each top-level key of a tree, from those of its tensors; whether these are tied does not matter."""
    return {name: digest_json(replace_tensors(part, by_name)) for name, part in skeleton.items()}
