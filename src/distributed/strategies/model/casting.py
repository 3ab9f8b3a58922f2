"""Casts around a model whose parameters are less precise than its inputs, and than the loss that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distributed.runtime.torch_compat import tree_map_only


def cast_calls(module: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Let calls have inputs of this type and outputs in fp32, for the loss; returns what undoes it.

    >>> layer = nn.Linear(1, 1, dtype=torch.bfloat16)
    >>> undo = cast_calls(layer, torch.bfloat16)
    >>> layer(torch.ones(1, 1)).dtype
    torch.float32
    """

    def lower(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, _caster(dtype), (args, kwargs))

    def raise_again(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, _caster(torch.float32), output)

    hooks = [module.register_forward_pre_hook(lower, with_kwargs=True), module.register_forward_hook(raise_again)]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
