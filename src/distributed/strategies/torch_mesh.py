"""TorchMesh: PyTorch-native parallelism as sizes of one mesh; today of its axis dp_replicate, which is DDP."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.core.plan import Plan, ReplicatePlan
from distributed.data.loader import Microbatch
from distributed.data.transfer import to_device
from distributed.runtime.session import Session
from distributed.strategies.base import MetricSum, NonFiniteLoss, Outcome, StateTree, StepOutput, StepTask
from distributed.strategies.batchnorm import SyncBatchNorm, synchronize_batchnorm

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchMesh:
    """Forward, backward, reduction, clipping and the optimizer, with no host synchronization in between on a GPU."""

    optimizer: torch.optim.Optimizer

    def __init__(self) -> None:
        self._desynchronize: Callable[[], None] = lambda: None

    def setup(self, task: StepTask, plan: Plan, session: Session) -> None:
        self._task, self._session = task, session
        self._moves = session.device.type != "cpu"
        self._checks_loss = plan.on_nan == "stop" and not self._moves  # on a GPU a look at the loss would wait for it
        self._clip_norm = plan.optimizer.clip_norm
        self.module = task.model.to(session.device)
        if plan.replicate.sync_batchnorm and session.world_size > 1:
            self._desynchronize = synchronize_batchnorm(self.module)
        self._batchnorms = [module for module in self.module.modules() if isinstance(module, SyncBatchNorm)]
        self.optimizer = task.make_optimizer(self.module, plan)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._model: nn.Module = self.module
        if session.world_size > 1:
            self._model = _replicate(self.module, plan.replicate, session.device, synced=bool(self._batchnorms))
        dtype = _DTYPES.get(plan.precision.kind)
        self._autocast = torch.autocast(session.device.type, dtype) if dtype else None
        self._scaler = None
        if plan.precision.kind == "fp16":
            self._scaler = torch.amp.GradScaler(
                session.device.type,
                init_scale=plan.precision.scaler_init_scale,
                growth_interval=plan.precision.scaler_growth_interval,
            )

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """One optimizer step over one or more micro-batches; `measure` adds metrics and the gradient's norm."""
        loss: torch.Tensor | None = None
        total_weight: torch.Tensor | None = None
        metrics = None
        last = len(microbatches) - 1
        for index, micro in enumerate(microbatches):
            batch = to_device(micro.batch, self._session.device) if self._moves else micro.batch
            with self._scope(micro, synchronizes=index == last):
                outcome = self._forward(self._model, batch)
                part = outcome.loss
                if outcome.weight is not None:
                    weight = outcome.weight if micro.size else outcome.weight * 0
                    total_weight = weight if total_weight is None else total_weight + weight
                    part = part * (weight * self._session.world_size)
                elif outcome.is_sum:
                    part = part * (self._session.world_size if micro.size else 0)
                elif micro.weight != 1.0:
                    part = part * micro.weight
                if not micro.size:
                    part = part.nan_to_num(0.0)  # a stand-in's loss has weight 0, whatever it is
                if self._checks_loss and not math.isfinite(value := part.item()):
                    raise NonFiniteLoss(value)
                if self._scaler is None:
                    part.backward()
                else:
                    self._scaler.scale(part).backward()
            loss = part.detach() if loss is None else loss + part.detach()
            if measure and index == last and micro.size:
                metrics = self._task.measure(outcome, micro.size)
        assert loss is not None
        if total_weight is not None:
            loss = loss * self._divide_gradients(total_weight)
        norm = self._finish_gradients(measure)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutput(loss, norm, metrics)

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]:
        with torch.no_grad():
            outcome = self._forward(self.module, to_device(batch, self._session.device) if self._moves else batch)
            weight: torch.Tensor | float = float(size) if outcome.weight is None else outcome.weight
            loss = MetricSum(outcome.loss.double() * (1.0 if outcome.is_sum else weight), weight)
            return {"loss": loss} | self._task.measure(outcome, size)

    def train(self, mode: bool) -> None:
        self._model.train(mode)

    def close(self) -> None:
        """Give the user's model back as it was made, with its new weights."""
        self._desynchronize()

    def state(self) -> StateTree:
        scaler = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()} | scaler

    def load_state(self, tree: StateTree) -> None:
        self.module.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])
        if self._scaler is not None and "scaler" in tree:
            self._scaler.load_state_dict(tree["scaler"])

    def _forward(self, model: nn.Module, batch: Any) -> Outcome:
        if self._autocast is None:
            return self._task.run(model, batch)
        with self._autocast:
            return self._task.run(model, batch)

    def _scope(self, micro: Microbatch, *, synchronizes: bool) -> Any:
        """Around one micro-batch: only the last reduces gradients, and a stand-in leaves no trace in BatchNorm."""
        if synchronizes and micro.size:
            return nullcontext()
        return self._special_scope(micro, synchronizes)

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        holds = not synchronizes and isinstance(self._model, DistributedDataParallel)
        for layer in self._batchnorms:
            layer.share_is_empty = not micro.size
        try:
            with self._model.no_sync() if holds else nullcontext():  # type: ignore[operator]
                yield
        finally:
            for layer in self._batchnorms:
                layer.share_is_empty = False

    def _divide_gradients(self, total_weight: torch.Tensor) -> torch.Tensor:
        """Divide by the weight of the whole global batch, which is known only now; returns the factor."""
        factor = 1.0 / self._session.sum("loss weight", total_weight.detach().double())
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
        return factor

    def _finish_gradients(self, measure: bool) -> torch.Tensor | None:
        if self._clip_norm is None and not measure:
            return None
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self._clip_norm is not None:
            return nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        return nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])


def _replicate(module: nn.Module, plan: ReplicatePlan, device: torch.device, *, synced: bool) -> nn.Module:
    """DistributedDataParallel; buffers are sent before each step only if some can differ between ranks."""
    if not any(p.requires_grad for p in module.parameters()):
        return module
    if device.type == "cpu":
        _make_contiguous(module)
    options: dict[str, Any] = {_buffer_option(): _buffers_can_differ(module) if synced else True}
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=plan.find_unused_parameters,
        static_graph=plan.static_graph,
        bucket_cap_mb=plan.bucket_cap_mb,
        gradient_as_bucket_view=True,
        **options,
    )


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
