"""BitwiseReplicas: a data-parallel step whose result has the same bytes at any number of ranks.

A step is always cut into the same shares, one for each virtual rank: kernels see the same shapes, random streams belong
to shares, and their gradients are added as one binary tree. Ranks only divide the shares among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from distributed.comm.layout import FlatLayout
from distributed.comm.tree import TreeSum, send_from_first
from distributed.core.env import announce_unset
from distributed.core.errors import CheckpointError, TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.data.virtual_ranks import seed_generators
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import foreach_mul_
from distributed.strategies.base import MetricSum, NonFiniteLoss, Outcome, StateTree, StepOutput, StepTask, add_sums
from distributed.strategies.checks.sparse_layers import refuse_sparse
from distributed.strategies.checks.torch_errors import explain_kernel
from distributed.strategies.data_parallel.batchnorm import synced_layer
from distributed.strategies.data_parallel.whole_batch import PartsOfBatch
from distributed.strategies.steps.evaluation_step import unless_empty
from distributed.strategies.steps.one_rank_step import OneRankStep
from distributed.strategies.virtual_rank_buffers import VirtualRankBuffers

T = TypeVar("T")
_LOSS, _WEIGHT, _WEIGHTED, _USED = range(4)  # scalars reduced with the gradients; from _USED on, one per parameter


class BitwiseReplicas(OneRankStep):
    """Runs forward and backward for each virtual rank, sums over all, then clips and steps on every rank."""

    _tree: TreeSum  # of the gradients, and of what belongs to them

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._restore_kernels: Callable[[], None] = lambda: None
        self._parts = PartsOfBatch() if plan.batch.leaves > 1 else nullcontext()

    def setup(self, task: StepTask, session: Session) -> None:
        self.check(task)
        super().setup(task, session)
        _refuse_collectives(self.module)
        self._cut = {"virtual_ranks": self._plan.batch.leaves, "global_batch": self._plan.batch.global_batch}
        modules = [self.module, *([] if self._loss is None else [self._loss])]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        send_from_first("rank 0's model", tensors, session)
        self._buffers = VirtualRankBuffers(*modules)
        self._make_sums()
        self._restore_kernels = _fix_kernels(session.device)

    def parameters_changed(self) -> None:
        super().parameters_changed()
        self._make_sums()

    def check(self, task: StepTask) -> None:
        super().check(task)
        refuse_sparse(task.model, "reproducible='bitwise'", "the leaves' gradients are added as dense ones")

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """One optimizer step over this rank's virtual ranks; `measure` adds metrics and the gradient's norm."""
        self._begin_step()
        self.clock.begin(measure)
        self._tree.discard()
        self._buffers.begin_step()
        missing = set(range(len(self._parameters)))  # parameters that no virtual rank of this rank has used
        is_weighted: bool | None = None
        metrics: dict[str, MetricSum] = {}
        last = max((index for index, micro in enumerate(microbatches) if micro.size), default=-1)
        for index, micro in enumerate(microbatches):
            if not micro.size:
                self._tree.add(None)
                continue
            outcome = self._train_share(micro)
            is_weighted = outcome.weight is not None
            missing &= self._add_share(micro)
            if measure and index == last:
                add_sums(metrics, self._task.measure(outcome, micro.size))
            elif measure and outcome.logged:
                add_sums(metrics, self._task.measure_logged(outcome, micro.size))
        if not self._is_settled:  # no virtual rank of this rank has a sample; the other ranks wait for this call
            self._is_settled = True
            self._task.settle(None, None, 0, self._trial())
        if measure:
            self._task.check_targets()
        loss = self._take_totals(missing, is_weighted)
        fewer_buffers = self._buffers.agree(self._session)  # before the update: nothing may fail after it
        norm = self._update(measure)
        if fewer_buffers:
            self._tree = self._make_tree()
        share = microbatches[0].virtual_share
        assert share is not None
        seed_generators(share.after_seed, self._session.device)
        return StepOutput(loss, norm, metrics if measure else None)

    def close(self) -> None:
        self._restore_kernels()
        super().close()

    def state(self) -> StateTree:
        return super().state() | {"bitwise": dict(self._cut)}

    def held_state(self) -> StateTree | None:
        held = super().held_state()
        return None if held is None else held | {"bitwise": dict(self._cut)}

    def load_state(self, tree: StateTree) -> None:
        saved = tree.get("bitwise", self._cut)  # none in a checkpoint of the normal mode
        differing = [f"{name}={saved[name]}, now {value}" for name, value in self._cut.items() if saved[name] != value]
        if differing:
            raise CheckpointError(
                f"the checkpoint was trained with {'; '.join(differing)}",
                why="reproducible='bitwise' promises the bytes of one run, and these settings change them",
                do="set these as before (global_batch is batch_size × ranks × gradient_accumulation_steps), "
                "or reproducible='off'",
            )
        super().load_state(tree)

    def _train_share(self, micro: Microbatch) -> Outcome:
        """Forward and backward under the share's random streams; the scalars hold its loss and weight."""
        assert micro.virtual_share is not None, "this strategy needs micro-batches of virtual ranks"
        batch = self.moved(micro.batch)
        seed_generators(micro.virtual_share.training_seed, self._session.device)
        self._task.samples = micro.size
        with self._parts:
            outcome = self._forward(self._model, batch)
        if not self._is_settled:
            outcome = self._settle(outcome, batch, micro.size)
        part = outcome.loss
        if outcome.weight is not None:
            part = unless_empty(part, outcome.weight) * outcome.weight
            self._scalars[_WEIGHT] = outcome.weight.detach()
            self._scalars[_WEIGHTED] = 1.0
        elif not outcome.is_sum:
            if micro.size:
                self._task.check_share(outcome, micro.size)
            part = part if micro.weight == 1.0 else part * micro.weight
        if self._checks_loss and not math.isfinite(value := part.item()):
            raise NonFiniteLoss(value)
        self._backward(part)
        self._scalars[_LOSS] = part.detach()
        return outcome

    def _call(self, step: Callable[[nn.Module, Any], T], model: nn.Module, batch: Any) -> T:
        try:
            return super()._call(step, model, batch)
        except RuntimeError as error:
            explain_kernel(error)
            raise

    def _backward(self, part: torch.Tensor) -> None:
        try:
            super()._backward(part)
        except RuntimeError as error:
            explain_kernel(error)
            raise

    def _add_share(self, micro: Microbatch) -> set[int]:
        """Add the share's gradients, scalars and buffers to the tree; returns the parameters that it did not use."""
        gradients = [parameter.grad for parameter in self._parameters]
        missing = {index for index, gradient in enumerate(gradients) if gradient is None}
        if missing:
            self._scalars[_USED:] = torch.tensor([float(g is not None) for g in gradients])
        self._tree.add([*gradients, self._scalars, *self._buffers.take_changes(micro)])
        if missing:
            self._scalars[_USED:] = 1.0
        for parameter in self._parameters:
            parameter.grad = None
        return missing

    def _take_totals(self, missing: set[int], is_weighted: bool | None) -> torch.Tensor:
        """Set the gradients and buffers of the whole step on the model; returns its loss, the same on every rank.

        The host reads a value only if this rank's virtual ranks were empty or did not use all parameters.
        """
        self.clock.mark()  # the sum waits for the other ranks' virtual ranks
        totals = self._tree.total()
        count = len(self._parameters)
        gradients, scalars, changes = totals[:count], totals[count], totals[count + 1 :]
        self._buffers.end_step(changes)
        if missing:  # parameters that no rank used have no gradient, as in one process: the optimizer skips them
            missing = {index for index, used in enumerate(scalars[_USED:].tolist()) if not used}
        for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            parameter.grad = None if index in missing else _laid_out(gradient, parameter)
        if is_weighted is None:
            is_weighted = scalars[_WEIGHTED].item() > 0
        if not is_weighted:
            return scalars[_LOSS].clone()
        factor = 1.0 / scalars[_WEIGHT]
        foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
        loss = scalars[_LOSS] * factor
        if self._checks_loss and not math.isfinite(value := loss.item()):  # a mean over no target at all
            raise NonFiniteLoss(value)
        return loss

    def _make_sums(self) -> None:
        """What is summed over the virtual ranks, for the parameters that are trained."""
        device = self._session.device
        self._scalars = torch.ones(_USED + len(self._parameters), dtype=torch.float64, device=device)
        self._scalars[:_USED] = 0.0
        self._tree = self._make_tree()

    def _make_tree(self) -> TreeSum:
        layout = FlatLayout([*self._parameters, self._scalars, *self._buffers.tensors])
        return TreeSum("gradients of the leaves", layout, self._session)


def _laid_out(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A gradient in the memory format of its parameter, which a fused optimizer needs."""
    is_alike = gradient.stride() == parameter.stride()
    return gradient if is_alike else torch.empty_like(parameter).copy_(gradient)


def _refuse_collectives(module: nn.Module) -> None:
    synced = synced_layer(module)
    if synced is not None:
        raise TaskError(
            f"{synced} is a SyncBatchNorm",
            why="SyncBatchNorm all-reduces in forward, and under reproducible='bitwise' the ranks run separate leaves",
            do="use BatchNorm, whose statistics are then those of one leaf, or GroupNorm",
        )


def _fix_kernels(device: torch.device) -> Callable[[], None]:
    """Set one thread and deterministic kernels in this process; returns the stack that undoes it."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cuda":
        announce_unset({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})  # cuBLAS reads it at its first use
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)

    def restore() -> None:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)

    return restore
