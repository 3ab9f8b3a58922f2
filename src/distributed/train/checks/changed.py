"""Which tensors have changed since a run began: by torch's count of writes, and where that says so, by their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from distributed.runtime.torch_compat import version_of
from distributed.train.checks.digest import digest


class _Begun(NamedTuple):
    """The tensor itself is kept, so that no other can have its identity."""

    tensor: torch.Tensor
    version: int
    digest: str


class Begun:
    """Named tensors as they were. Parameters are not read: one that was written counts as changed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._begun = {
            name: _Begun(tensor, version_of(tensor), "" if isinstance(tensor, nn.Parameter) else digest(tensor))
            for name, tensor in tensors.items()
        }

    def changed(self, now: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those that hold something else, or were not there.

        >>> tensors = {"count": torch.zeros(1), "table": torch.ones(2)}
        >>> begun = Begun(tensors)
        >>> tensors["count"] += 1
        >>> sorted(begun.changed(tensors))
        ['count']
        """
        return {name: tensor for name, tensor in now.items() if self._has_changed(name, tensor)}

    def take(self, names: Iterable[str]) -> None:
        """These have changed before: a checkpoint has them, or another rank. A rank that resumes began with them."""
        for name in names:
            self._begun.pop(name, None)

    def _has_changed(self, name: str, tensor: torch.Tensor) -> bool:
        begun = self._begun.get(name)
        if begun is None:
            return True
        if tensor is begun.tensor and version_of(tensor) == begun.version:
            return False
        return not begun.digest or digest(tensor) != begun.digest  # DDP sends all buffers, also those that are the same
