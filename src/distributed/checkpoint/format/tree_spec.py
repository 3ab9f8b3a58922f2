"""TreeSpec: what a state tree holds, without its bytes, and the chunks that they go into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.checkpoint.format.digests import digest_json
from distributed.checkpoint.format.layout import ITEM_BYTES, ChunkPlan
from distributed.runtime.tensor_shard import Box


@dataclass(frozen=True)
class TreeSpec:
    """A tree without its bytes: names, types, shapes, scalars, and the chunks that its bytes go into."""

    skeleton: dict[str, Any]
    specs: Mapping[str, tuple[str, tuple[int, ...]]]  # name → dtype, whole shape
    plan: tuple[ChunkPlan, ...]  # of whole tensors, the same on every rank
    split: frozenset[str] = frozenset()  # names of tensors that the ranks hold in parts
    boxes: Mapping[str, tuple[str, Box]] = field(default_factory=dict)  # a name for each that is stored here → of what
    box_plan: tuple[ChunkPlan, ...] = ()  # of these boxes

    @property
    def signature(self) -> str:
        """The same on two ranks exactly when they hold the same tensors, each of them whole or in parts."""
        parts = {name: ["in parts"] if name in self.split else [] for name in self.specs}
        return digest_json([[name, dtype, list(shape), *parts[name]] for name, (dtype, shape) in self.specs.items()])

    @property
    def nbytes(self) -> int:
        """Of the whole state, on however many ranks."""
        return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.specs.values())
