"""MeshSpec: the world as named axes whose sizes multiply to the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the parallel axes, outermost first: ranks that differ in tp only are next to each other.

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

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that see the same samples, and share the work on them."""
        return self.pp * self.cp * self.tp

    @property
    def is_replicas(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.world_size == self.dp_replicate

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where on each axis a rank is.

        >>> MeshSpec(pp=2, dp_shard=2, tp=2).coordinates(5)
        {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'cp': 0, 'tp': 1}
        """
        found: dict[str, int] = {}
        for name, size in reversed(self.sizes().items()):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.sizes()}

    def data_rank(self, rank: int) -> int:
        """Which share of the samples a rank takes.

        >>> [MeshSpec(pp=2, dp_shard=2, tp=2).data_rank(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def stream(self, rank: int) -> int:
        """Which random numbers a rank draws: stages have blocks of their own; ranks that share a block, the same."""
        return self.data_rank(rank) + self.data_ranks * self.coordinates(rank)["pp"]

    def is_first_of_replica(self, rank: int) -> bool:
        """Whether a rank is the first of those that see the same samples."""
        place = self.coordinates(rank)
        return place["pp"] == place["cp"] == place["tp"] == 0

    def __str__(self) -> str:
        named = [f"{name}={size}" for name, size in self.sizes().items() if size > 1]
        return " × ".join(named) or "one rank"
