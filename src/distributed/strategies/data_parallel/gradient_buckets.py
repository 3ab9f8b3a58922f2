"""Gradient buckets: DDP's reduction of gradients, after the backward pass and without its hooks.

DDP reduces a bucket during the backward pass, from a thread of autograd and on its own streams, which are fixed when it
is made. A step that is captured as a CUDA graph gains nothing from that overlap with the host. So the sums are taken
here, in buckets with DDP's layout, so that three and more ranks add each number in the same order.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from distributed.core.plan import ReplicatePlan
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import broadcast_coalesced, default_group, foreach_copy_
from distributed.strategies.checks.reduction import left_out
from distributed.strategies.data_parallel.bucket_layout import BucketLayout

_BROADCAST_BYTES = 250 << 20  # of buffers that are sent together, as DDP does


def send_buffers(module: nn.Module, session: Session) -> None:
    """Broadcast rank 0's buffers to all ranks."""
    if buffers := [buffer for buffer in module.buffers() if not buffer.is_meta]:  # forward may put in others
        with session.named("buffers of rank 0"):
            broadcast_coalesced(default_group(), buffers, _BROADCAST_BYTES, 0)


class GradientBuckets:
    """The mean over all ranks of each gradient, in flat tensors that stay where they are."""

    def __init__(
        self,
        module: nn.Module,
        plan: ReplicatePlan,
        session: Session,
        *,
        sends_buffers: bool,
        of: Collection[nn.Parameter] | None = None,
        name: str = "gradients",
    ) -> None:
        """For a model with equal weights on all ranks. `sends_buffers`: buffers may differ between ranks.

        `of`: the parameters whose gradients are reduced; None: all that are trained. `name`: of the collective.
        """
        self._session, self._name = session, name
        self._part = 1 / session.world_size
        self._module, self._sends_buffers = module, sends_buffers
        wanted = None if of is None else set(of)
        named = [(p, name) for name, p in module.named_parameters() if p.requires_grad]
        self._names = {parameter: name for parameter, name in named if wanted is None or parameter in wanted}
        self.layout = BucketLayout(plan.bucket_cap_mb).buckets(list(self._names))
        self._flats = [_flat(bucket) for bucket in self.layout]
        self._views = [_views(flat, bucket) for flat, bucket in zip(self._flats, self.layout, strict=True)]

    def send_buffers(self) -> None:
        """Broadcast rank 0's buffers before the first pass of a step."""
        if self._sends_buffers:
            send_buffers(self._module, self._session)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce after the last backward pass of a step; raises if a parameter has no gradient, as DDP needs all.

        As in DDP, each rank divides before the sum.
        """
        missing = [name for parameter, name in self._names.items() if parameter.grad is None]
        if missing:
            raise left_out(missing, self._session.rank)
        for flat, views, bucket in zip(self._flats, self._views, self.layout, strict=True):
            foreach_copy_(views, [parameter.grad for parameter in bucket if parameter.grad is not None])
            flat.mul_(self._part)
            self._session.sum(self._name, flat)
            for parameter, view in zip(bucket, views, strict=True):
                parameter.grad = view


def _flat(bucket: list[nn.Parameter]) -> torch.Tensor:
    return torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)


def _views(flat: torch.Tensor, bucket: list[nn.Parameter]) -> list[torch.Tensor]:
    """Views with the memory format of each parameter, if that is dense."""
    views, start = [], 0
    for parameter in bucket:
        stride = torch.empty_like(parameter, device="meta").stride()
        views.append(torch.as_strided(flat, parameter.shape, stride, start))
        start += parameter.numel()
    return views
