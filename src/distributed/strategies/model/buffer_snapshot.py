"""BufferSnapshot: the values of modules' buffers, restored after passes that must change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

_Place = tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]


class _Kept(NamedTuple):
    """A buffer, its module and its value; None: it was declared and not made yet."""

    owner: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor | None
    before: torch.Tensor | None


class BufferSnapshot:
    """The values of all buffers at construction."""

    @torch.no_grad()
    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._kept = [
            _Kept(owner, name, buffer, None if buffer is None else buffer.detach().clone())
            for owner, name, buffer in self._places()
        ]

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [kept.buffer for kept in self._kept if kept.buffer is not None]

    def is_current(self) -> bool:
        """Whether the modules still have the same buffers; some modules replace theirs in forward."""
        return [id(buffer) for _, _, buffer in self._places()] == [id(kept.buffer) for kept in self._kept]

    @torch.no_grad()
    def retake(self, *, unless: torch.Tensor | None = None) -> None:
        """Take the values again, in the same memory; if `unless` holds a true value, keep the old ones."""
        pairs = [(k.before, k.buffer) for k in self._kept if k.buffer is not None and k.before is not None]
        is_off = unless.bool() if unless is not None and pairs else None
        for before, buffer in pairs:
            if is_off is None:
                before.copy_(buffer)
            else:
                torch.where(is_off, before, buffer, out=before)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values, also of replaced buffers, and remove new buffers."""
        known = {(id(kept.owner), kept.name) for kept in self._kept}
        for owner, name, _ in self._places():
            if (id(owner), name) not in known:
                del owner[name]
        for kept in self._kept:
            if kept.buffer is not None and kept.before is not None:
                kept.buffer.copy_(kept.before)
            kept.owner[kept.name] = kept.buffer

    def _places(self) -> list[_Place]:
        modules = (m for module in self._modules for m in module.modules())
        return [(m._buffers, name, buffer) for m in modules for name, buffer in m._buffers.items()]


@contextmanager
def kept_buffers(module: nn.Module | None) -> Iterator[None]:
    """A scope for passes outside training: a module's buffers are restored after it."""
    before = None if module is None else BufferSnapshot(module)
    try:
        yield
    finally:
        if before is not None:
            before.restore()
