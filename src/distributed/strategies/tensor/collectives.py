"""Pairs of collectives for tensor parallelism: one for activations, its conjugate for their gradients.

They have no name: blocks are compiled with them, and the compiler cannot trace the report of a collective. If a rank
hangs in one, its stack shows which it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def copy_to(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Identity into a region where each rank computes a part; its gradient is all-reduced."""
    return _Copy.apply(x, group)  # type: ignore[no-any-return]


def reduce_from(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce out of such a region; its gradient is unchanged."""
    return _Reduce.apply(x, group)  # type: ignore[no-any-return]


def gather_from(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather for a computation that every rank repeats; each rank takes its own part of the gradient."""
    return _Gather.apply(x, dim, group)  # type: ignore[no-any-return]


def scatter_to(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a replicated tensor; its gradient is all-gathered."""
    return _Scatter.apply(x, dim, group)  # type: ignore[no-any-return]


def gather_sequence(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather of a sequence into a region where each rank computes a part; its gradient is reduce-scattered."""
    return _GatherSequence.apply(x, dim, group)  # type: ignore[no-any-return]


def scatter_sequence(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter out of such a region into shards of the sequence; its gradient is all-gathered."""
    return _ScatterSequence.apply(x, dim, group)  # type: ignore[no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _own_part(grad, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _own_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _all_gather(grad, ctx.dim, ctx.group), None, None


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    part = x.movedim(dim, 0).contiguous()
    whole = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
    _GATHER(whole, part, group=group)
    return whole.movedim(0, dim).contiguous()


def _reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    if x.device.type == "cpu":  # not every gloo has a reduce-scatter
        return _own_part(_all_reduce(x, group), dim, group)
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty((whole.shape[0] // dist.get_world_size(group), *whole.shape[1:]))
    _REDUCE_SCATTER(part, whole, group=group)
    return part.movedim(0, dim).contiguous()


def _own_part(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    length = x.shape[dim] // dist.get_world_size(group)
    return x.narrow(dim, dist.get_rank(group) * length, length).contiguous()


# torch 2.13 has new names for them and warns of the old ones
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
