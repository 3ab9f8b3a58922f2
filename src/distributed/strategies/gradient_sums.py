"""Reduction of gradients that no hook reduces, over the ranks of a group, in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from distributed.runtime.session import Session
from distributed.strategies.placement import local

_BUCKET_BYTES = 64 * 2**20


def mean_gradients(name: str, parameters: Iterable[nn.Parameter], session: Session, group: dist.ProcessGroup) -> None:
    """The mean over a group's ranks, in place; a parameter without a gradient counts as one with zeros."""
    _reduce(name, parameters, session, group, 1.0 / group.size())


def sum_gradients(name: str, parameters: Iterable[nn.Parameter], session: Session, group: dist.ProcessGroup) -> None:
    """The sum over a group's ranks, in place; a parameter without a gradient counts as one with zeros."""
    _reduce(name, parameters, session, group, 1.0)


@torch.no_grad()
def _reduce(
    name: str, parameters: Iterable[nn.Parameter], session: Session, group: dist.ProcessGroup, factor: float
) -> None:
    for grads in _buckets(_gradient(parameter) for parameter in parameters):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        session.sum(name, flat, group)
        if factor != 1.0:
            flat *= factor
        parts = flat.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The gradients, with zeros for unused parameters, because all ranks must send as many numbers."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Buckets of neighbouring gradients of one type."""
    bucket: list[torch.Tensor] = []
    held = 0
    for grad in grads:
        nbytes = grad.numel() * grad.element_size()
        if bucket and (held + nbytes > _BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(grad)
        held += nbytes
    if bucket:
        yield bucket
