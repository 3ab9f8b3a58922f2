"""DDP: a model that every data rank holds whole, with buckets that do not depend on what happened before."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel

from distributed.core.plan import ReplicatePlan
from distributed.strategies.sparse_gradients import sparse_parameters

_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def replicate(
    module: nn.Module,
    plan: ReplicatePlan,
    device: torch.device,
    sends_buffers: bool,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """DistributedDataParallel; buffers are sent before each step only if some can differ between ranks."""
    if not any(p.requires_grad for p in module.parameters()):
        return module
    if device.type == "cpu":
        _make_contiguous(module)
    options: dict[str, Any] = {_buffer_option(): sends_buffers}
    replicated = DistributedDataParallel(
        module,  # without device_ids, by which inputs would be moved: they are on the device already
        find_unused_parameters=plan.find_unused_parameters,
        static_graph=plan.static_graph,
        bucket_cap_mb=plan.bucket_cap_mb,
        gradient_as_bucket_view=True,
        process_group=group,
        **options,
    )
    if not plan.find_unused_parameters and not plan.static_graph:
        _settle_buckets(replicated)
    return replicated


def _settle_buckets(replicated: DistributedDataParallel) -> None:
    """Let DDP lay out its buckets now, in the order of the parameters, with a backward pass that changes nothing.

    It does so anew after the first one, and where a number lies decides in which order three or more ranks add it.
    Without this, a resumed run would take its first step with another layout than the run that was not interrupted.
    """
    module = replicated.module
    parameters = [p for p in module.parameters() if p.requires_grad]
    sparse = sparse_parameters(module)
    own = module.__dict__.get("forward")  # of a compiled or patched model

    def touch(parameter: nn.Parameter) -> torch.Tensor:
        if parameter not in sparse:
            return parameter.sum().float()
        first = torch.zeros(1, dtype=torch.long, device=parameter.device)
        return nn.functional.embedding(first, parameter, sparse=True).sum().float()  # DDP expects no dense gradient

    module.forward = lambda: torch.stack([touch(p) for p in parameters]).sum() * 0  # type: ignore[method-assign]
    try:
        replicated().backward()
    finally:
        del module.forward  # the class's own again
        if own is not None:
            module.forward = own  # type: ignore[method-assign]
    for parameter in parameters:
        parameter.grad = None


def sees_its_share(module: nn.Module) -> bool:
    """Whether a layer counts the samples of its rank alone, where BatchNorm is not synchronized."""
    return isinstance(module, _BatchNorm) and module.training


def buffers_can_differ(module: nn.Module, normalizes: bool) -> bool:
    """Whether there are buffers beside running statistics that are over all ranks."""
    return next(own_buffers(module, normalizes), None) is not None


def own_buffers(module: nn.Module, normalizes: bool) -> Iterator[torch.Tensor]:
    """Buffers that may differ between ranks. `normalizes`: BatchNorm does so by the samples of all ranks."""
    for m in module.modules():
        is_shared = isinstance(m, _NormBase) and (normalizes or not isinstance(m, _BatchNorm))
        if not (is_shared and _STATISTICS.issuperset(m._buffers)):
            yield from m.buffers(recurse=False)


def _make_contiguous(module: nn.Module) -> None:
    """gloo sends dense but permuted tensors wrongly, without an error."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()


def _buffer_option() -> str:
    """torch 2.13 has a new name for it and warns of the old one."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
