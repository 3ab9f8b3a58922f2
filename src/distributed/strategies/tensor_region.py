"""Region: what the cut layers of one module share, on the way into their part of the width and out of it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distributed.core.errors import PlanError
from distributed.strategies.random_streams import RankStream
from distributed.strategies.tensor_collectives import (
    copy_to,
    gather_sequence,
    reduce_from,
    scatter_sequence,
    scatter_to,
)


class Region:
    """An input that is copied or gathered once for all layers that read it, and outputs that are summed."""

    def __init__(
        self, group: dist.ProcessGroup, sequence_dim: int | None, readers: int, stream: RankStream | None = None
    ) -> None:
        self.group = group
        self.stream = stream or RankStream(dist.get_rank(group))  # of random numbers, within the region
        self.sequence_dim = sequence_dim  # where activations outside of the region are shards of a sequence
        self.is_whole = False  # layers have all of their parameters, for once
        self.is_gathered = False  # their input was already gathered
        self.untried = ""  # the path of the module whose first forward has yet to show that the layers can be cut
        self.stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outputs: list[torch.Tensor] | None = None  # of the layers that end it, while these are compared
        self._readers = readers
        self._left = 0
        self._last: tuple[torch.Tensor, torch.Tensor, bool] | None = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        for stand_in, real in self.stand_ins:
            if x is stand_in:
                return real
        if self.is_gathered:
            return x
        last = self._last
        if last is None or last[0] is not x or last[2] != torch.is_grad_enabled():
            last = (x, self.take(x), torch.is_grad_enabled())
            self._left = self._readers
        self._left -= 1
        self._last = last if self._left else None
        return last[1]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_dim is None:
            return copy_to(x, self.group)
        if x.dim() < 3:
            raise PlanError(
                f"a layer in a block whose sequences are shared out got a tensor of shape {tuple(x.shape)}",
                why="the sequence, which is to be gathered, is not a dimension of its own",
                do="keep (batch, sequence, width) in the blocks, or leave sequence_parallel out",
            )
        return gather_sequence(x, self.sequence_dim, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.untried:
            raise PlanError(
                f"layers of {self.untried} are used by another module, outside of its forward",
                why="so it cannot be tried whether they compute the same with a share of the width between them",
                do=f"call {self.untried} itself, or give tensor_parallel_plan without it",
            )
        total = self._total(x)
        if self.outputs is not None:
            self.outputs.append(total)
        return total

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_dim is None:
            return x if self.is_whole else reduce_from(x, self.group)
        if self.is_whole:
            return scatter_to(x, self.sequence_dim, self.group)
        return scatter_sequence(x, self.sequence_dim, self.group)
