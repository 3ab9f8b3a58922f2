"""Buffers that a forward pass changes (BatchNorm's statistics, counters), in a step with several virtual ranks.

Every virtual rank begins with the buffers of the step's beginning. The step ends with these plus the mean of the
changes, weighted by samples; integers and booleans end as virtual rank 0 left them, so a counter advances once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import NormBase


class _Buffer:
    """One buffer, its owner, and how it was before."""

    def __init__(self, name: str, owner: nn.Module, key: str, tensor: torch.Tensor) -> None:
        self.name, self._owner, self._key, self._tensor = name, owner, key, tensor
        self.tensor = _countable(tensor)
        changes = isinstance(owner, NormBase)  # even if the layer is frozen now
        self.changes = torch.tensor(changes, device=tensor.device)
        self.begin_step()

    def begin_step(self) -> None:
        self._initial = self.tensor.clone()
        self._version = self._tensor._version

    def take_change(self, micro: Microbatch, *, looks: bool) -> torch.Tensor | None:
        """The virtual rank's part of the step's change; resets the buffer. `looks`: record whether it changed."""
        assert micro.virtual_share is not None
        current = self._owner._buffers[self._key]
        assert current is not None
        now = _countable(current)
        if looks:
            self.changes |= (now != self._initial).any() | self._is_written
        change: torch.Tensor | None = None
        if now.is_floating_point() or now.is_complex():  # infinities that stay have changed by nothing
            change = torch.where(now == self._initial, 0, now - self._initial) * micro.weight
        elif micro.virtual_share.number == 0:
            change = now - self._initial
        self._owner._buffers[self._key] = self._tensor
        self.tensor.copy_(self._initial)
        self._version = self._tensor._version
        return change

    def refuse_change(self) -> None:
        if self._is_written:
            raise TaskError(
                f"the buffer {self.name} changed in this step, but not in the first one",
                why="reproducible='bitwise' reduces only buffers that change in the first step",
                do="let forward change it in every step while it trains, or never",
            )

    @property
    def _is_written(self) -> bool:
        """Whether torch's version counter changed. Native kernels and `.data` bypass it; reading it never waits."""
        current = self._owner._buffers[self._key]
        return current is not self._tensor or current._version != self._version


class VirtualRankBuffers:
    """All buffers of a model and its loss. After the first step only those that change are kept and reduced."""

    def __init__(self, *modules: nn.Module) -> None:
        named = ((owner, key, b) for m in modules for owner in m.modules() for key, b in owner._buffers.items())
        owners = {id(b): (owner, key) for owner, key, b in named if b is not None}
        found = {id(b): (name, b) for module in modules for name, b in module.named_buffers()}
        self._watched = [_Buffer(name, *owners[id(b)], b) for name, b in found.values()]
        self._still: list[_Buffer] = []
        self._agreed = not self._watched

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [buffer.tensor for buffer in self._watched]

    def begin_step(self) -> None:
        for buffer in self._watched:
            buffer.begin_step()

    @torch.no_grad()
    def take_changes(self, micro: Microbatch) -> list[torch.Tensor | None]:
        """The changes by one virtual rank, in the order of `tensors`."""
        for buffer in self._still:
            buffer.refuse_change()
        return [buffer.take_change(micro, looks=not self._agreed) for buffer in self._watched]

    @torch.no_grad()
    def end_step(self, changes: Sequence[torch.Tensor]) -> None:
        """Apply `changes`, the sums over all virtual ranks."""
        for buffer, change in zip(self._watched, changes, strict=True):
            buffer.tensor.add_(change)

    def agree(self, session: Session) -> bool:
        """After the first step, keep the buffers that changed on any rank; returns whether `tensors` changed."""
        if self._agreed:
            return False
        changes = torch.stack([buffer.changes.to(session.device) for buffer in self._watched])
        flags = session.max("buffers that change", changes.int()).tolist()
        self._still = [buffer for buffer, flag in zip(self._watched, flags, strict=True) if not flag]
        self._watched = [buffer for buffer, flag in zip(self._watched, flags, strict=True) if flag]
        for buffer in self._still:
            buffer.begin_step()
        self._agreed = True
        return bool(self._still)


def _countable(tensor: torch.Tensor) -> torch.Tensor:
    """Booleans as bytes, which can be subtracted and added (and wrap around: 0 - 1 + 1 is 0)."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
