"""Computing in a low precision with parameters that are held in it: what goes into the model and comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distributed.runtime.torch_compat import tree_map_only


@contextmanager
def compute_in(module: nn.Module, dtype: torch.dtype, device: str) -> Iterator[torch.autocast]:
    """While this is open, inputs become as precise as the parameters, and outputs fp32 again, for the loss.

    The autocast that it returns lets layers work with buffers that have stayed in fp32.
    """

    def lower(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, _caster(dtype), (args, kwargs))

    def raise_again(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, _caster(torch.float32), output)

    hooks = [module.register_forward_pre_hook(lower, with_kwargs=True), module.register_forward_hook(raise_again)]

    try:
        yield torch.autocast(device, dtype)
    finally:
        for hook in hooks:
            hook.remove()


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
