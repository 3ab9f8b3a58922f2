"""DDP: a replica of the model on every data-parallel rank, with buckets that are the same after a resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.core.engines.engine import ENGINES
from distributed.core.plan import Plan, ReplicatePlan
from distributed.runtime.torch_compat import BatchNormBase, NormBase
from distributed.runtime.torch_module_compat import without_hooks
from distributed.strategies.checks.sparse_layers import sparse_parameters
from distributed.strategies.data_parallel.bucket_layout import BucketLayout

_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


class StepModule(nn.Module):
    """A module whose forward is a whole step, for DDP and FSDP, whose hooks are around one forward of the root.

    A step of the user's own may call the model several times, or other methods of it than forward.
    """

    def __init__(self, module: nn.Module, run: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def forward(self, batch: Any, run: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """`run`: another step than that of training."""
        return (self._run if run is None else run)(self.module, batch)


def replicate(
    module: nn.Module,
    plan: ReplicatePlan,
    device: torch.device,
    *,
    sends_buffers: bool,
    group: dist.ProcessGroup | None = None,
    is_alike: bool = False,
    layout: BucketLayout | None = None,
) -> nn.Module:
    """DistributedDataParallel; buffers are broadcast before each step only if some can differ between ranks.

    Unless all ranks already hold the same model, rank 0's model is broadcast. `layout`: another one than the plan's.
    """
    layout = layout or BucketLayout(plan.bucket_cap_mb)
    if not any(p.requires_grad for p in module.parameters()):
        return module
    if device.type == "cpu":
        _make_contiguous(module)
    options: dict[str, Any] = {_buffer_option(): sends_buffers}
    replicated = DistributedDataParallel(
        module,  # without device_ids, because inputs are on the device already
        find_unused_parameters=plan.find_unused_parameters,
        static_graph=plan.static_graph,
        bucket_cap_mb=layout.cap_mb,
        gradient_as_bucket_view=True,
        process_group=group,
        init_sync=not is_alike,
        **options,
    )
    if not plan.find_unused_parameters and not plan.static_graph:
        _settle_buckets(replicated, layout)
    return replicated


def release(replicated: DistributedDataParallel) -> None:
    """Take DDP's hooks from the parameters, so that another one can reduce the gradients of other ones."""
    for parameter in replicated.parameters():
        parameter.grad = None  # a view of one of its buckets
    del replicated.logger, replicated.reducer  # which removes its hooks when nothing refers to it any more


def _settle_buckets(replicated: DistributedDataParallel, layout: BucketLayout) -> None:
    """Let DDP lay out its buckets now, in the order of the layout, by a backward pass that changes nothing.

    DDP rebuilds its buckets after the first backward pass, and the place of a number in its bucket decides in which
    order three or more ranks add it. Without this, the first step of a resumed run would use another layout than the
    run that was not interrupted. No buffer is broadcast: outside of a step, none is restored after an abort.
    """
    module = replicated.module
    parameters = layout.in_order([p for p in module.parameters() if p.requires_grad])[::-1]  # autograd goes backward
    sparse = sparse_parameters(module)
    own = module.__dict__.get("forward")  # of a compiled or patched model
    sends_buffers, replicated.broadcast_buffers = replicated.broadcast_buffers, False

    def touch(parameter: nn.Parameter) -> torch.Tensor:
        if parameter not in sparse:
            return parameter.sum().float()
        first = torch.zeros(1, dtype=torch.long, device=parameter.device)
        return nn.functional.embedding(first, parameter, sparse=True).sum().float()  # DDP expects no dense gradient

    module.forward = lambda: torch.stack([touch(p) for p in parameters]).sum() * 0  # type: ignore[method-assign]
    try:
        with without_hooks(module):
            replicated().backward()
    finally:
        replicated.broadcast_buffers = sends_buffers
        del module.forward  # the class's own again
        if own is not None:
            module.forward = own  # type: ignore[method-assign]
    for parameter in parameters:
        parameter.grad = None


def why_not_captured(plan: Plan) -> str:
    """Why the plan keeps the step of several ranks from being captured as a CUDA graph; "": it does not."""
    if plan.speed.capture == "off":
        return "capture=False"
    if ENGINES.entries[plan.strategy].owns_reduction:
        return f"backend={plan.strategy!r} reduces gradients in its own way"
    if plan.collectives != "nccl":
        return f"the collectives are those of {plan.collectives}, which run on the host"
    if plan.replicate.compression.kind != "none":
        return f"compression={plan.replicate.compression.kind!r} reduces gradients by hooks of DDP"
    if plan.replicate.tunes_buckets:
        return "bucket_cap_mb='auto' measures how DDP reduces while the backward pass runs"
    if plan.replicate.find_unused_parameters:
        return "find_unused_parameters=True looks in each step at which parameters the ranks have used"
    if plan.replicate.static_graph:
        return "static_graph=True needs DDP, which reduces gradients by hooks"
    return ""


def sees_its_share(module: nn.Module) -> bool:
    """Whether a layer counts the samples of its rank alone, where BatchNorm is not synchronized."""
    return isinstance(module, BatchNormBase) and module.training


def buffers_can_differ(module: nn.Module, normalizes: bool) -> bool:
    """Whether there are buffers other than synchronized running statistics."""
    return next(own_buffers(module, normalizes), None) is not None


def own_buffers(module: nn.Module, normalizes: bool) -> Iterator[torch.Tensor]:
    """The buffers that may differ between ranks. `normalizes`: BatchNorm is synchronized over all ranks."""
    for m in module.modules():
        is_shared = isinstance(m, NormBase) and (normalizes or not isinstance(m, BatchNormBase))
        if not (is_shared and _STATISTICS.issuperset(m._buffers)):
            yield from m.buffers(recurse=False)


def _make_contiguous(module: nn.Module) -> None:
    """Make tensors contiguous, because gloo sends permuted ones wrongly, without an error."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()


def _buffer_option() -> str:
    """torch's function under the name of this version: torch 2.13 renames it and warns of the old name."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
