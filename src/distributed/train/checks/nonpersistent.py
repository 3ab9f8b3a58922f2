"""Buffers that are not persistent: torch leaves them out of `state_dict()`, and a run that changed one would lose it.

Most of them are tables that each process makes for itself; a checkpoint has only those that have changed since the run
began.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distributed.core.errors import CheckpointError
from distributed.runtime.torch_module_compat import non_persistent_buffers
from distributed.train.checks.changed import Begun


class NonPersistent:
    """Those of one module. Made when it is ready to be trained."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._begun = module, Begun(_found(module))

    def changed(self) -> dict[str, torch.Tensor]:
        """By their paths, as this rank has them."""
        return self._begun.changed(_found(self._module))

    def take(self, saved: Mapping[str, Any]) -> None:
        self._begun.take(saved)
        take(self._module, saved)


@torch.no_grad()
def take(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Also those that this module has not made yet, or has in another shape."""
    for path, value in saved.items():
        prefix, _, name = path.rpartition(".")
        try:
            owner = module.get_submodule(prefix)
        except AttributeError:
            raise CheckpointError(
                f"the checkpoint is of another model: it has a buffer {path}, and this one no {prefix}",
                do="pass the model that was trained, or another checkpoint_dir",
            ) from None
        known = owner._buffers.get(name)
        if known is not None and known.shape == value.shape and known.dtype == value.dtype:
            known.copy_(value)
        else:
            device = next((t.device for t in (*module.buffers(), *module.parameters()) if not t.is_meta), value.device)
            owner._buffers.pop(name, None)
            owner.register_buffer(name, value.to(device, copy=True), persistent=False)


def _found(module: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for prefix, owner in module.named_modules():
        for name in sorted(non_persistent_buffers(owner)):
            buffer = owner._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
