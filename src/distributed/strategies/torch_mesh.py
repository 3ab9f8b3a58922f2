"""TorchMesh: PyTorch-native parallelism as sizes of one mesh; today of its axis dp_replicate, which is DDP."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from distributed.core.plan import Plan, ReplicatePlan
from distributed.data.loader import Microbatch
from distributed.data.transfer import to_device
from distributed.runtime.session import Session
from distributed.strategies.base import NonFiniteLoss, Outcome, StateTree, StepOutput, StepTask
from distributed.strategies.batchnorm import SyncBatchNorm, synchronize_batchnorm
from distributed.strategies.replica import Replica, unless_empty


class TorchMesh(Replica):
    """Forward, backward, reduction, clipping and the optimizer, with no host synchronization in between on a GPU."""

    def __init__(self) -> None:
        self._desynchronize: Callable[[], None] = lambda: None

    def setup(self, task: StepTask, plan: Plan, session: Session) -> None:
        super().setup(task, plan, session)
        if plan.replicate.sync_batchnorm and session.world_size > 1:
            self._desynchronize = synchronize_batchnorm(self.module)
        self._batchnorms = [module for module in self.module.modules() if isinstance(module, SyncBatchNorm)]
        self._buffers_differ = False
        self._buffers_at_first: list[torch.Tensor] | None = None
        if session.world_size > 1:
            self._buffers_differ = _buffers_can_differ(self.module)
            self._model = _replicate(self.module, plan.replicate, session.device, self._buffers_differ)

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """One optimizer step over one or more micro-batches; `measure` adds metrics and the gradient's norm."""
        self._begin_step()
        self.clock.begin(measure)
        loss: torch.Tensor | float = 0.0
        total_weight: torch.Tensor | None = None
        last = len(microbatches) - 1
        for index, micro in enumerate(microbatches):
            if index == last and micro.size:
                outcome, part = self._pass(micro)
            else:
                with self._special_scope(micro, index == last):
                    outcome, part = self._pass(micro)
            loss = loss + part
            if outcome.weight is not None:
                weight = outcome.weight if micro.size else outcome.weight * 0
                total_weight = weight if total_weight is None else total_weight + weight
        metrics = self._task.measure(outcome, micro.size) if measure and micro.size else None
        if total_weight is not None:
            factor = self._divide_gradients(total_weight)
            loss = loss * (factor if self._moves else factor.item())
        return StepOutput(loss, self._update(measure), metrics)

    def _pass(self, micro: Microbatch) -> tuple[Outcome, torch.Tensor | float]:
        """Forward and backward over one micro-batch, and its part of the loss."""
        batch = to_device(micro.batch, self._session.device) if self._moves else micro.batch
        outcome = self._task.run(self._model, batch) if self._autocast is None else self._forward(self._model, batch)
        part = outcome.loss
        if outcome.weight is not None:
            part = unless_empty(part, outcome.weight) * (
                outcome.weight * (self._session.world_size if micro.size else 0)
            )
        elif outcome.is_sum:
            part = part * (self._session.world_size if micro.size else 0)
        elif micro.weight != 1.0:
            part = part * micro.weight
        if not micro.size:
            part = part.nan_to_num(0.0)  # a stand-in's loss has weight 0, whatever it is
        value = part.detach() if self._moves else part.item()
        if self._checks_loss and not math.isfinite(value):
            raise NonFiniteLoss(float(value))
        self.clock.mark()
        self._backward(part)
        return outcome, value

    def state(self) -> StateTree:
        self._agree_on_buffers()
        return super().state()

    def held_state(self) -> StateTree | None:
        """Where ranks may have different buffers, only rank 0 has those that count, unless nothing changes them."""
        held = super().held_state()
        if not self._buffers_differ or self._session.is_main:
            return held
        if self._buffers_at_first is None:  # before the first step of a world all ranks have the same
            return held
        now, first = self._own_buffers(), self._buffers_at_first
        return held if len(now) == len(first) and all(map(torch.equal, now, first)) else None

    def _begin_step(self) -> None:
        super()._begin_step()
        if self._buffers_differ and self._buffers_at_first is None:
            self._buffers_at_first = [buffer.detach().clone() for buffer in self._own_buffers()]

    def _own_buffers(self) -> list[torch.Tensor]:
        """Those that may differ between ranks."""
        modules = (m for m in self.module.modules() if not isinstance(m, SyncBatchNorm))
        return [buffer for m in modules for buffer in m.buffers(recurse=False)]

    def train(self, mode: bool) -> None:
        if not mode:
            self._agree_on_buffers()
        super().train(mode)

    def _agree_on_buffers(self) -> None:
        """Rank 0's are those that count, for DDP, for a checkpoint and for an evaluation. Every rank comes here."""
        if self._buffers_differ:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)

    def close(self) -> None:
        """Give the user's model back as it was made, with its new weights."""
        self._desynchronize()

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        """Around a micro-batch: only the last reduces gradients, and a stand-in leaves no trace in BatchNorm."""
        holds = not synchronizes and isinstance(self._model, DistributedDataParallel)
        for layer in self._batchnorms:
            layer.share_is_empty = not micro.size
        unsynced = [] if micro.size else [m for m in self.module.modules() if _sees_its_share(m)]
        for module in unsynced:
            module.eval()  # keeps its running statistics as they are
        try:
            with self._model.no_sync() if holds else nullcontext():  # type: ignore[operator]
                yield
        finally:
            for layer in self._batchnorms:
                layer.share_is_empty = False
            for module in unsynced:
                module.train()

    def _divide_gradients(self, total_weight: torch.Tensor) -> torch.Tensor:
        """Divide by the weight of the whole global batch, which is known only now; returns the factor."""
        factor = 1.0 / self._session.sum("loss weight", total_weight.detach().double())
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
        return factor


def _replicate(module: nn.Module, plan: ReplicatePlan, device: torch.device, sends_buffers: bool) -> nn.Module:
    """DistributedDataParallel; buffers are sent before each step only if some can differ between ranks."""
    if not any(p.requires_grad for p in module.parameters()):
        return module
    if device.type == "cpu":
        _make_contiguous(module)
    options: dict[str, Any] = {_buffer_option(): sends_buffers}
    replicated = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=plan.find_unused_parameters,
        static_graph=plan.static_graph,
        bucket_cap_mb=plan.bucket_cap_mb,
        gradient_as_bucket_view=True,
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
    own = module.__dict__.get("forward")  # of a compiled or patched model
    module.forward = lambda: torch.stack([p.sum().float() for p in parameters]).sum() * 0  # type: ignore[method-assign]
    try:
        replicated().backward()
    finally:
        del module.forward  # the class's own again
        if own is not None:
            module.forward = own  # type: ignore[method-assign]
    for parameter in parameters:
        parameter.grad = None


def _sees_its_share(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and module.training


def _buffers_can_differ(module: nn.Module) -> bool:
    """Whether there are buffers beside those of BatchNorm layers that see the same on every rank."""
    return any(
        not isinstance(m, SyncBatchNorm) and next(m.buffers(recurse=False), None) is not None for m in module.modules()
    )


def _make_contiguous(module: nn.Module) -> None:
    """gloo sends dense but permuted tensors wrongly, without an error."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()


def _buffer_option() -> str:
    """torch 2.13 has a new name for it and warns of the old one."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
