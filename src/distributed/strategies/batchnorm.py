"""BatchNorm over the whole micro-batch of all ranks, on any device and for shares of any size, empty ones included.

torch's own SyncBatchNorm runs on GPUs only and would count the stand-in sample of an empty share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Normalize(torch.autograd.Function):
    """Normalization whose mean and variance, and whose gradients through them, go over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, count: torch.Tensor, is_empty: bool
    ) -> torch.Tensor:
        shape = _channel_shape(x)
        normal = (x - mean.view(shape)) * rstd.view(shape)
        ctx.save_for_backward(normal, rstd, count)
        ctx.is_empty = is_empty
        return normal

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        normal, rstd, count = ctx.saved_tensors
        dims = _reduced_dims(grad)
        sums = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
        dist.all_reduce(sums)
        if ctx.is_empty:  # a stand-in had no part in the statistics, so nothing flows back through them
            return torch.zeros_like(grad), None, None, None, None
        shape = _channel_shape(grad)
        mean_grad, mean_grad_normal = (sums / count).view(2, *shape)
        return (grad - mean_grad - normal * mean_grad_normal) * rstd.view(shape), None, None, None, None


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm layer that sees the micro-batch of all ranks while it trains."""

    share_is_empty = False  # set by the strategy around a stand-in batch
    copies = 1  # how many ranks see the same samples: means do not show it, the unbiased variance would

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm expects at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training or not dist.is_initialized():  # in an evaluation the ranks are not in step
            return super().forward(input)
        x = input if input.dtype == torch.float64 else input.float()
        count, mean, var = self._global_statistics(x)
        self._update_running(count, mean, var)
        normal = _Normalize.apply(x, mean, torch.rsqrt(var + self.eps), count, self.share_is_empty)
        if self.affine:
            shape = _channel_shape(x)
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _global_statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count, mean and biased variance of each channel over all ranks; two passes, so that no digits are lost."""
        with torch.no_grad():
            dims = _reduced_dims(x)
            weight = 0.0 if self.share_is_empty else 1.0
            count = x.new_tensor([weight * x.numel() / x.size(1)])
            sums = torch.cat([x.sum(dims) * weight, count])
            dist.all_reduce(sums)
            count = sums[-1:]
            mean = sums[:-1] / count
            squares = (x - mean.view(_channel_shape(x))).square().sum(dims) * weight
            dist.all_reduce(squares)
            return count, mean, squares / count

    def _update_running(self, count: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        with torch.no_grad():
            momentum: float | torch.Tensor = 0.0 if self.momentum is None else self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    momentum = 1.0 / self.num_batches_tracked.float()
            seen = count / self.copies
            unbiased = var * (seen / (seen - 1).clamp_min(1))
            self.running_mean.mul_(1 - momentum).add_(mean.to(self.running_mean.dtype) * momentum)
            self.running_var.mul_(1 - momentum).add_(unbiased.to(self.running_var.dtype) * momentum)


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronize_batchnorm(model: nn.Module, copies: int = 1) -> Callable[[], None]:
    """Replace every BatchNorm layer inside the model by one that sees all ranks; returns what undoes it.

    Both layers hold the same parameters and buffers, so optimizers stay valid and nothing is copied back. `copies`: how
    many ranks see the same samples.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
                setattr(parent, name, _synced(child, copies))
                replaced.append((parent, name, child))

    def undo() -> None:
        for parent, name, child in replaced:
            child.train(getattr(parent, name).training)
            setattr(parent, name, child)

    return undo


def _synced(layer: _BatchNorm, copies: int) -> SyncBatchNorm:
    synced = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
    )
    synced.copies = copies
    synced._parameters, synced._buffers = layer._parameters, layer._buffers
    return synced.train(layer.training)


def _reduced_dims(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channel_shape(x: torch.Tensor) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]
