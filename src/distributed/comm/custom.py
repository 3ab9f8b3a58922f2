"""The all-reduce of a course on distributed training, as a class with the world's numbers."""

from __future__ import annotations

from typing import Any

import torch

from distributed.comm.collectives.reductions import all_reduce
from distributed.comm.groups.places import place_in
from distributed.core.errors import ConfigError


class CustomCommunication:
    """A rank of a group, which reduces over a ring of all its ranks.

    >>> CustomCommunication(world_size=1, rank=0).ring_allreduce(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, world_size: int, rank: int, group: Any = None) -> None:
        place = place_in(group)
        found = (1, 0) if place is None else (place.size, place.rank)
        if (world_size, rank) != found:
            raise ConfigError(
                f"CustomCommunication(world_size={world_size}, rank={rank})",
                why=f"this process is rank {found[1]} of {found[0]} in the group",
                do="CustomCommunication(dist.get_world_size(group), dist.get_rank(group))",
            )
        self.world_size, self.rank, self._group = world_size, rank, group

    def ring_allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        summed: torch.Tensor = all_reduce(tensor, group=self._group, name="ring_allreduce", algorithm="ring")
        return summed
