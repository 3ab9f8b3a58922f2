"""Clipping each number of the gradient by itself, which ranks do to their shards as one process does to the whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from distributed.runtime.torch_compat import foreach_clamp_
from distributed.strategies.placement import local


@torch.no_grad()
def clip_values(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Clip as `nn.utils.clip_grad_value_` does, also sharded, sparse and complex gradients; NaN stays.

    Both parts of a complex number are clipped, and of a sparse gradient the sums of repeated rows.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[3.0, -0.5]])
    >>> clip_values(layer.parameters(), 1.0)
    >>> layer.weight.grad
    tensor([[ 1.0000, -0.5000]])
    """
    numbers = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local(parameter.grad)
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        numbers.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    if numbers:
        foreach_clamp_(numbers, -most, most)
