"""Batch normalization over the samples of all ranks, on any device and for shares of any size, even empty.

torch's own SyncBatchNorm runs on GPUs only, would count the stand-in sample of an empty share, and has no second
derivative, which a gradient penalty needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed.runtime.torch_compat import BatchNormBase

Groups = Sequence[dist.ProcessGroup | None]  # over which the samples are divided, reduced in sequence; None: all ranks


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, BatchNormBase) for module in model.modules())


def synced_layer(model: nn.Module) -> str | None:
    """The first layer that waits for all ranks in its forward pass, for strategies whose ranks do not go together."""
    return next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)


def normalize_over_ranks(
    x: torch.Tensor,
    *,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    groups: Groups,
    copies: int = 1,
    is_empty: bool = False,
) -> torch.Tensor:
    """F.batch_norm in training for the samples of all ranks, of which `x` are this rank's.

    `copies`: how many of the ranks have the same samples, which would change the unbiased variance.
    """
    with torch.no_grad():
        wide = _widened(x)
        dims = _reduced_dims(wide)
        sums = torch.cat([wide.sum(dims), wide.new_full((1,), wide.numel() / wide.size(1))])
        sums = _sum(torch.zeros_like(sums) if is_empty else sums, groups)
        count, mean = sums[-1:], sums[:-1] / sums[-1:]
        squares = (wide - mean.view(_channel_shape(wide))).square().sum(dims)  # a second pass: no digits are lost
        var = _sum(torch.zeros_like(squares) if is_empty else squares, groups) / count
        seen = count / copies
        for running, value in ((running_mean, mean), (running_var, var * (seen / (seen - 1).clamp_min(1)))):
            if running is not None:
                running.mul_(1 - momentum).add_(value.to(running.dtype) * momentum)
        rstd = torch.rsqrt(var + eps)
    normal: torch.Tensor = _Normalize.apply(x, weight, bias, mean, rstd, count, eps, tuple(groups), is_empty)
    return normal


class _Normalize(torch.autograd.Function):
    """Normalizes, with gradients through the mean and variance of all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        groups: Groups,
        is_empty: bool,
    ) -> torch.Tensor:
        shape = _channel_shape(x)
        ctx.save_for_backward(x, weight, mean, rstd, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps, ctx.groups, ctx.is_empty = eps, groups, is_empty
        normal = (_widened(x) - mean.view(shape)) * rstd.view(shape)
        if weight is not None:
            normal = normal * weight.view(shape)
        if bias is not None:
            normal = normal + bias.view(shape)
        return normal.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, rstd, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative: the statistics depend on x, too
            count, mean, rstd = _differentiable_statistics(_widened(x), ctx.eps, ctx.groups, ctx.is_empty)
        shape = _channel_shape(x)
        wide = _widened(gradient)
        normal = (_widened(x) - mean.view(shape)) * rstd.view(shape)
        dims = _reduced_dims(wide)
        own = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        if ctx.is_empty:  # a stand-in sample is not in the statistics, so it gets no gradient through them
            own = _nothing_of(own)
        mean_gradient, mean_product = (_Sum.apply(own, ctx.groups) / count).view(2, *shape)
        for_x = (wide - mean_gradient - normal * mean_product) * rstd.view(shape)
        if weight is not None:
            for_x = for_x * weight.view(shape)
        if ctx.is_empty:
            for_x = _nothing_of(for_x)
        for_weight = None if weight is None else own[1].to(weight.dtype)
        for_bias = None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype)
        return for_x.to(x.dtype), for_weight, for_bias, None, None, None, None, None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks. Each rank has its own loss, and their sum is differentiated: the gradient is again a sum over
    ranks, to any order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        ctx.groups = groups
        return _sum(x.clone(), groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.groups), None


def _differentiable_statistics(
    x: torch.Tensor, eps: float, groups: Groups, is_empty: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and 1 / standard deviation of each channel over all ranks, as functions of this rank's samples."""
    dims = _reduced_dims(x)
    count = _sum(x.new_full((1,), 0.0 if is_empty else x.numel() / x.size(1)), groups)
    own = x.sum(dims)
    mean = _Sum.apply(_nothing_of(own) if is_empty else own, groups) / count
    own = (x - mean.view(_channel_shape(x))).square().sum(dims)
    var = _Sum.apply(_nothing_of(own) if is_empty else own, groups) / count
    return count, mean, torch.rsqrt(var + eps)


def _nothing_of(x: torch.Tensor) -> torch.Tensor:
    """Zeros with the graph of `x`, so that a rank without samples makes the same collectives in a second backward."""
    return x.nan_to_num(0.0, 0.0, 0.0) * 0.0


def _sum(values: torch.Tensor, groups: Groups) -> torch.Tensor:
    """All-reduce over the ranks of all groups, in place."""
    # Without a name: a model may be compiled with it, and the compiler cannot trace the report of a collective.
    for group in groups:
        dist.all_reduce(values, group=group)
    return values


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _reduced_dims(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channel_shape(x: torch.Tensor) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]
