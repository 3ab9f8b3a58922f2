"""HorovodEngine: every rank has the whole model, and Horovod makes the ranks' gradients, or their steps, one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.engines.horovod.buckets import (
    DEFAULT_MB,
    BucketReducer,
    as_wire,
    make_buckets,
    real,
    wire_dtype,
)
from distributed.engines.horovod.env import fusion_threshold_mb
from distributed.engines.horovod.ring import Ring, import_horovod, join_ring, mpi_did_not_start, no_mpi_in_wheel
from distributed.runtime.session import Session
from distributed.strategies.base import StateTree, StepOutput, StepTask
from distributed.strategies.checks.replica_tensors import Named, model_tensors
from distributed.strategies.checks.sparse_layers import refuse_sparse
from distributed.strategies.replicated import Replicated
from distributed.strategies.steps.microbatches import Passed


class HorovodEngine(Replicated):
    """What hvd.DistributedOptimizer does, with the user's own optimizer.

    That class makes a new optimizer: its state is empty, and the user's scheduler acts on the old one. Its way of
    working needs none: a bucket of gradients goes to Horovod as soon as the last micro-batch's backward pass has made
    them, which overlaps with the rest of that pass, and the step waits for all of them. So the optimizer stays the
    user's, and clipping and the gradient scaler come after the reduction as everywhere else.

    Adasum does not reduce gradients. As in Horovod, every rank takes a step of its own, by its own gradients, and the
    differences that these steps made are combined; so moments of the optimizers differ between the ranks, and a
    checkpoint has those of rank 0.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._ring: Ring | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._reducer: BucketReducer | None = None
        self._holds = False  # whether more micro-batches come before the gradients are whole
        self._is_adasum = False
        self._handled: BaseException | None = None  # what the script handles while it calls us

    def check(self, task: StepTask) -> None:
        super().check(task)
        hvd = import_horovod()
        _refuse_wrapped(task.optimizer)
        if self._plan.engine["controller"] == "mpi":
            if not hvd.mpi_built():
                raise no_mpi_in_wheel()
            if self._plan.world_size > 1:
                raise mpi_did_not_start(self._plan.world_size, "this process would start them")

    def _refuse_sparse(self, module: nn.Module) -> None:
        refuse_sparse(module, "backend='horovod'", "this engine sends dense gradients")
        super()._refuse_sparse(module)

    def _replicate(self, *, group: Any = None, is_alike: bool = False) -> nn.Module:
        plan, session = self._plan, self._session
        _refuse_wrapped(self.optimizer)
        self._hvd, self._handled = import_horovod(), sys.exception()
        self._ring = join_ring(session, plan.engine, plan.collective_timeout_s)
        self._name_parameters()
        self._finds_unused = plan.replicate.find_unused_parameters
        self._is_adasum = plan.engine["reduction"] == "adasum"
        self._compresses = self._keeps_small = plan.engine["compression"] == "fp16"
        self._begin_alike(session)
        self._reduce_trained()
        return self.module

    def _reduce_trained(self) -> None:
        """Send the gradients of the parameters that are trained."""
        plan = self._plan
        assert self._ring is not None
        if not self._is_adasum:
            size_mb = next(mb for mb in (plan.engine["fusion_mb"], fusion_threshold_mb(), DEFAULT_MB) if mb is not None)
            buckets = make_buckets(self._named, size_mb * 2**20, compresses=self._compresses)
            self._reducer = BucketReducer(self._hvd, self._ring, buckets)
            self._hooks = [p.register_post_accumulate_grad_hook(self._hook(name)) for name, p in self._named]

    def parameters_changed(self) -> None:
        self._remove_hooks()  # else they would be taken for the user's
        super().parameters_changed()

    def _replicate_again(self, *, group: Any = None) -> None:
        self._name_parameters()
        self._reduce_trained()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _name_parameters(self) -> None:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._named = [(names[id(parameter)], parameter) for parameter in self._parameters]

    def _begin_alike(self, session: Session) -> None:
        """Every rank starts with rank 0's weights and buffers."""
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if tensor.numel():
                    tensor.copy_(
                        session.send_from(
                            "first weights", 0, tensor.detach().clone(memory_format=torch.contiguous_format)
                        )
                    )

    def _begin_step(self) -> None:
        super()._begin_step()
        self._agree_on_buffers()

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        self._holds = not synchronizes
        try:
            with super()._special_scope(micro, synchronizes):
                yield
        finally:
            self._holds = False

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def send(parameter: torch.Tensor) -> None:
            if not self._holds:
                self._send(name, parameter)

        return send

    def _send(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        assert self._reducer is not None
        if parameter.grad.is_sparse:
            raise TaskError(
                f"the gradient of {name} is sparse",
                why="the engine horovod sends dense gradients only",
                do="make its layer with sparse=False",
            )
        self._reducer.add(name)

    def _finish_step(self, passed: Passed, measure: bool) -> StepOutput:
        if self._reducer is not None:
            self._finish_reduction(self._reducer)
        return super()._finish_step(passed, measure)

    def _finish_reduction(self, reducer: BucketReducer) -> None:
        unused = self._send_rest(reducer) if reducer.missing or self._finds_unused else []
        reducer.finish()
        for parameter in unused:
            parameter.grad = None

    def _send_rest(self, reducer: BucketReducer) -> list[torch.Tensor]:
        """Gradients that the last micro-batch did not touch, and zeros where there are none.

        Returns the parameters that no rank had a gradient for, which an optimizer must leave alone.
        """
        missing = [name for name, parameter in self._named if parameter.grad is None]
        if missing and not self._finds_unused:
            raise TaskError(
                f"{len(missing)} parameters got no gradient on rank {self._session.rank}: {', '.join(missing[:5])}",
                why="the model left them out in this step, and the other ranks may wait for them",
                do="set find_unused_parameters=True, or freeze them with requires_grad_(False)",
            )
        used = torch.tensor([int(parameter.grad is not None) for _, parameter in self._named])
        for name, parameter in self._named:
            if name in reducer.missing:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._send(name, parameter)
        if not self._finds_unused:
            return []
        assert self._ring is not None
        with self._ring.wait("used parameters", ()):
            by_ranks = self._hvd.allreduce(used, name="used parameters", op=self._hvd.Sum)
        return [parameter for (_, parameter), ranks in zip(self._named, by_ranks.tolist(), strict=True) if not ranks]

    def _update(self, measure: bool) -> torch.Tensor | None:
        if not self._is_adasum:
            return super()._update(measure)
        assert self._ring is not None
        with torch.no_grad():
            before = [parameter.detach().clone() for parameter in self._parameters]
            norm = super()._update(measure)
            changes = [parameter - start for parameter, start in zip(self._parameters, before, strict=True)]
            sent = {}
            for (name, _), change in zip(self._named, changes, strict=True):
                sent[name] = self._combine(name, change)
            with self._ring.wait("steps", sent):
                for (name, parameter), start, change in zip(self._named, before, changes, strict=True):
                    handle, wire = sent.pop(name)
                    self._hvd.synchronize(handle)
                    real(change).copy_(wire)
                    parameter.copy_(start + change)
        return norm

    def _combine(self, name: str, change: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Begin to combine a parameter's changes; Horovod's handle, and what it combines in place."""
        wire = as_wire(real(change), wire_dtype(change, compresses=self._compresses))
        try:
            return self._hvd.allreduce_async_(wire, name=f"step.{name}", op=self._hvd.Adasum), wire
        except (RuntimeError, ValueError) as failed:  # Horovod may have ended before this rank sends
            assert self._ring is not None
            self._ring.raise_if_lost(f"step.{name}", failed)
            raise

    def close(self) -> None:
        """Leave Horovod's world, which also ends the wait of a rank that is still in it."""
        self._remove_hooks()
        if self._ring is not None:
            self._ring.leave(failed=sys.exception() not in (None, self._handled))
        super().close()

    def replicated(self) -> Named:
        """After Adasum the ranks' optimizers differ by design."""
        return model_tensors(self.module, self._replicas) if self._is_adasum else super().replicated()

    @property
    def is_gated(self) -> bool:
        """No: what ends Horovod's collectives does not close the gate first."""
        return False

    def held_state(self) -> StateTree | None:
        """None where this process cannot continue in another world: a new one then resumes from the checkpoint."""
        return super().held_state() if self._ring is None or self._ring.can_rejoin else None


def _refuse_wrapped(optimizer: Any) -> None:
    if hasattr(optimizer, "_requires_update"):  # what every hvd.DistributedOptimizer has
        raise TaskError(
            "the optimizer is an hvd.DistributedOptimizer",
            why="the wrapper would reduce every gradient again, and its state is not that of the optimizer inside",
            do="pass the optimizer that you would wrap: this engine does the rest",
        )
