"""MeshSpec: the world as named axes whose sizes multiply to the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the parallel axes, outermost first.

    >>> MeshSpec(dp_replicate=4).world_size
    4
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            assert size >= 1, f"mesh axis {name} has size {size}"

    def sizes(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes().values())

    def __str__(self) -> str:
        named = [f"{name}={size}" for name, size in self.sizes().items() if size > 1]
        return " × ".join(named) or "one rank"
