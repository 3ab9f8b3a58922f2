"""Channels last: weights of convolutions in the memory format of tensor cores. Values and shapes stay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def to_channels_last(module: nn.Module) -> Callable[[], None]:
    """Convert 4D parameters to channels last, in place; returns the function that undoes it.

    A convolution with such a weight converts its input, and its output has this format too, so batches need no change.
    """
    changed = [p for p in module.parameters() if p.dim() == 4 and not p.is_meta]
    for parameter in changed:
        parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def undo() -> None:
        for parameter in changed:
            parameter.data = parameter.data.contiguous()
            parameter.grad = None

    return undo


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the state of each parameter the parameter's memory format, which fused kernels need.

    State that was loaded, or made by an earlier training, is contiguous.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value).detach()
