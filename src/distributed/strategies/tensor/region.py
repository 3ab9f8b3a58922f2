"""Region: the shared input and the summed output of one module's cut layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from distributed.core.errors import PlanError
from distributed.runtime.session import Session
from distributed.strategies.model.random_streams import RankStream
from distributed.strategies.tensor.collectives import (
    copy_to,
    gather_sequence,
    reduce_from,
    scatter_sequence,
    scatter_to,
)


class Region:
    """An input that is copied or gathered once for all layers that read it, and outputs that are summed."""

    def __init__(
        self,
        session: Session,
        group: dist.ProcessGroup,
        sequence_dim: int | None,
        readers: int,
        stream: RankStream | None = None,
    ) -> None:
        self.session, self.group = session, group
        self.stream = stream or RankStream(dist.get_rank(group))  # of random numbers, within the region
        self.sequence_dim = sequence_dim  # if activations outside of the region are shards of a sequence
        self.is_whole = False  # in a trial: layers have all of their parameters
        self._is_gathered = False  # the input is already gathered
        self.untried = ""  # the path of a module whose trial, in its first forward, is still to be made
        self._stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outputs: list[torch.Tensor] | None = None  # of the layers that end it, while these are compared
        self._readers = readers
        self._left = 0
        self._last: tuple[torch.Tensor, torch.Tensor, bool] | None = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A scope for a trial, in which layers have all of their parameters."""
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False

    @contextmanager
    def kept_outputs(self) -> Iterator[list[torch.Tensor]]:
        """A scope that collects the outputs of the region's last layers for a comparison."""
        outputs: list[torch.Tensor] = []
        self._outputs = outputs
        try:
            yield outputs
        finally:
            self._outputs = None

    def await_trial(self, path: str) -> None:
        """Expect the trial of the module at this path: until then no other module may use its layers."""
        self.untried = path

    def admit(self) -> None:
        """Record that the module was tried, or is about to be."""
        self.untried = ""

    def gather_before(self, stand_ins: Sequence[tuple[torch.Tensor, torch.Tensor]], *, is_gathered: bool) -> None:
        """Set the layers' input, directly or in place of these stand-ins, until `forget_input`."""
        self._stand_ins, self._is_gathered = list(stand_ins), is_gathered

    def forget_input(self) -> None:
        self._stand_ins, self._is_gathered = [], False

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        for stand_in, real in self._stand_ins:
            if x is stand_in:
                return real
        if self._is_gathered:
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
                f"a layer in a block with sharded sequences got a tensor of shape {tuple(x.shape)}",
                why="the sequence must be gathered, and is not a separate dimension of this tensor",
                do="keep (batch, sequence, width) in the blocks, or leave sequence_parallel out",
            )
        return gather_sequence(x, self.sequence_dim, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.untried:
            raise PlanError(
                f"layers of {self.untried} are used by another module, outside of its forward",
                why="whether they compute the same with a share of the width between them cannot be tried there",
                do=f"call {self.untried} itself, or give tensor_parallel_plan without it",
            )
        total = self._total(x)
        if self._outputs is not None:
            self._outputs.append(total)
        return total

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_dim is None:
            return x if self.is_whole else reduce_from(x, self.group)
        if self.is_whole:
            return scatter_to(x, self.sequence_dim, self.group)
        return scatter_sequence(x, self.sequence_dim, self.group)
