"""Gradients that no hook reduces, over the ranks of a group: flat, so that there is one collective for all of a type."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


def mean_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """The mean over a group's ranks, in place."""
    _reduce(parameters, group, 1.0 / group.size())


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """The sum over a group's ranks, in place."""
    _reduce(parameters, group, 1.0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    here = getattr(tensor, "to_local", None)
    return here() if here is not None else tensor  # type: ignore[no-any-return]


@torch.no_grad()
def _reduce(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, factor: float) -> None:
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            by_type.setdefault(grad.dtype, []).append(grad)
    for grads in by_type.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        if factor != 1.0:
            flat *= factor
        parts = flat.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
