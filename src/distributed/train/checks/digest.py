"""Digests of a run's live state, one a component, cheap enough to take between two steps.

Large tensors are folded on their device into 1,024 wrapping sums of their bits before anything is copied, so a digest
costs one pass over memory. They find differences, not forgeries: what is stored has strong hashes of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from distributed.checkpoint.format.tree import flatten
from distributed.runtime.tensor_shard import TensorShard

_FOLD = 1024
_RAW_BYTES = 1 << 16  # up to this size a tensor's own bytes are hashed
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tree: Any) -> str:
    """16 hex digits of a tree of tensors and JSON values; equal bytes give equal digests, on any device.

    Of a tensor that the ranks hold in parts, it is that of the boxes that are here.


    >>> digest({"w": torch.ones(3), "step": 1}) == digest({"w": torch.ones(3), "step": 1})
    True
    >>> digest({"w": torch.ones(3)}) == digest({"w": torch.ones(3) + 1e-7})
    False
    """
    tensors, skeleton = flatten(tree)
    mixed = hashlib.blake2b(json.dumps(skeleton, sort_keys=True).encode(), digest_size=8)
    folded: list[tuple[str, torch.Tensor | None]] = []
    for name, leaf in sorted(tensors.items()):
        folded.append((f"{name}:{tuple(leaf.shape)}:{leaf.dtype}", None))
        pieces = sorted(leaf.pieces, key=lambda pair: pair[0]) if isinstance(leaf, TensorShard) else [("", leaf)]
        folded += [(str(box), _fold(piece.detach())) for box, piece in pieces]
    for label, sums in folded:
        mixed.update(label.encode())
        if sums is not None:
            mixed.update(sums.cpu().numpy().tobytes())
    return mixed.hexdigest()


def digests(components: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(tree) for name, tree in components.items()}


def _fold(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits).view(-1)
    bits = bits.view(_INTEGERS[bits.element_size()]) if bits.dtype != torch.bool else bits.to(torch.int8)
    if bits.numel() * bits.element_size() <= _RAW_BYTES:
        return bits
    whole = bits.numel() // _FOLD * _FOLD
    sums = bits[:whole].view(-1, _FOLD).sum(0, dtype=torch.int64)
    sums[: bits.numel() - whole] += bits[whole:]
    return sums
