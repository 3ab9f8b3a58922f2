"""MeshStep: the code that steps of replicated and of sharded models share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import foreach_mul_, gradient_order
from distributed.runtime.torch_module_compat import forget_unscaled
from distributed.strategies.base import NonFiniteLoss, Outcome, StateTree, StepOutput, StepTask
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.checks.parameter_hooks import ParameterHooks
from distributed.strategies.checks.reduction import reduction_check
from distributed.strategies.checks.sparse_layers import refuse_sparse, sparse_parameters
from distributed.strategies.checks.torch_errors import explain
from distributed.strategies.data_parallel.bucket_layout import BucketChoice, BucketLayout, different, said_of
from distributed.strategies.data_parallel.ddp import StepModule, buffers_can_differ, release, replicate
from distributed.strategies.data_parallel.reduction_clock import ReductionClock
from distributed.strategies.data_parallel.whole_batch import WholeBatch
from distributed.strategies.placement import local
from distributed.strategies.speed.memory_format import lay_out_state
from distributed.strategies.steps.microbatches import Passed
from distributed.strategies.steps.step_by_hand import StepByHand


class MeshStep(StepByHand):
    """Forward, backward, reduction, clipping and the optimizer, with no host synchronization in between on a GPU."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._layout = BucketLayout(plan.replicate.bucket_cap_mb)
        self.bucket_choice: BucketChoice | None = None  # while buckets are measured, and from then on
        self._restore_layers: Callable[[], None] = lambda: None
        self._saved: set[str] | None = None  # the names of the tensors that a checkpoint holds; None: all

    def check(self, task: StepTask) -> None:
        super().check(task)
        self._refuse_sparse(task.model)
        if self._plan.precision.kind == "fp8":
            from distributed.strategies.speed.float8 import need_float8_layers  # takes long to import

            need_float8_layers(task.model)

    def setup(self, task: StepTask, session: Session) -> None:
        self._refuse_sparse(task.model)
        super().setup(task, session)
        self._ranks = self._plan.mesh.data_ranks
        self._normalizes = self._plan.replicate.sync_batchnorm and session.world_size > 1
        self._buffers_differ = self._ranks > 1 and buffers_can_differ(self.module, self._normalizes)
        self._whole_batch = self._share_batch()
        if session.world_size > 1:
            self._hooks_of_parameters = ParameterHooks(self.module.parameters())
            self._until_closed.callback(self._return_hooks)
        self._make_phases()
        if session.world_size > 1 and not session.is_dry:
            self._changes = self._watch_changes()
            for phase in self._phases:
                phase.changes = self._watch_changes()

    def parameters_changed(self) -> None:
        super().parameters_changed()
        if self._hooks_of_parameters is not None:  # of those that were frozen, autograd would call them
            self._return_hooks()
            self._hooks_of_parameters = ParameterHooks(self.module.parameters())

    def _return_hooks(self) -> None:
        assert self._hooks_of_parameters is not None
        self._hooks_of_parameters.close()

    def _refuse_sparse(self, module: nn.Module) -> None:
        """Refuse embeddings with sparse=True if their gradients cannot be reduced, measured or stepped."""
        if self._plan.world_size > 1 and self._plan.collectives == "nccl":
            refuse_sparse(module, "the ranks' collectives are NCCL's", "NCCL has no sum of sparse tensors")
        kind = self._plan.replicate.compression.kind
        if self._plan.world_size > 1 and kind != "none":
            why, instead = "what is compressed are dense gradients", "set compression='none'"
            refuse_sparse(module, f"compression is {kind!r}", why, instead)
        if self._plan.world_size > 1 and self._plan.speed.parameters != "fp32":
            refuse_sparse(module, "bf16_parameters", "sparse gradients in bf16 cannot be summed over ranks")

    def _share_batch(self) -> WholeBatch | None:
        """The scope that gives batch_norm and the like the samples of all ranks; None if each rank has them all."""
        raise NotImplementedError

    def _watch_changes(self) -> ForwardChanges | None:
        """The check for parameters that a forward pass changes, in the first steps of several ranks."""
        raise NotImplementedError

    def _add_lora(self) -> None:
        if self._plan.memory.lora is not None:
            from distributed.strategies.model.lora import ensure_lora  # takes long to import

            self._saved = ensure_lora(self.module, self._plan.memory.lora, self._plan.seed)

    def _use_float8(self) -> None:
        """Convert layers to fp8 before the model is sharded, while their sizes are those of whole layers."""
        if self._plan.precision.kind == "fp8":
            from distributed.strategies.speed.float8 import use_float8  # takes long to import

            layers, self._restore_layers = use_float8(self.module)
            self.decisions.append(layers.decision())

    def _replicate(self, *, group: dist.ProcessGroup | None = None, is_alike: bool = False) -> nn.Module:
        """The DDP module that training calls in place of the model, of the user's own step or of a loss alone."""
        module = self.module
        if self.is_by_hand:
            module = StepModule(self.module, lambda model, loss: loss)
        elif self._task.has_own_step:
            module = StepModule(self.module, self._task.run)
        how: dict[str, Any] = {"group": group, "is_alike": is_alike, "layout": self._layout}
        how["sends_buffers"] = self._buffers_differ and not self.is_by_hand
        return replicate(module, self._plan.replicate, self._session.device, **how)

    def _run_own_step(self, model: nn.Module, batch: Any) -> Outcome:
        return model(batch) if isinstance(model, DistributedDataParallel) else self._task.run(model, batch)

    def _replicate_again(self, *, group: dist.ProcessGroup | None = None) -> None:
        """Reduce the gradients of other parameters than before; all ranks hold the same."""
        self._check_reduced = None
        if isinstance(self._model, DistributedDataParallel):
            release(self._model)
        self._model = self._replicate(group=group, is_alike=True)
        self._check_reduction()

    def _check_reduction(self) -> None:
        """Check the reduction of DDP, and time it, if training calls DDP."""
        self.clock.reduction = None
        if isinstance(self._model, DistributedDataParallel):
            self._check_reduced = reduction_check(self._model, self.module, self._session.rank)
            if self._plan.is_replicated and not self._phases and not sparse_parameters(self.module):
                self.clock.reduction = self._time_reduction(self._model)

    def _time_reduction(self, replicated: DistributedDataParallel) -> ReductionClock | None:
        """By DDP's timers, unless hooks send something else than its buckets."""
        if self._plan.replicate.compression.kind != "none":
            return None
        return ReductionClock(replicated, self._layout, self._session)

    def _lay_out_state(self) -> None:
        """Give the optimizer's state the memory format of the parameters, which DDP may have changed."""
        if isinstance(self._model, DistributedDataParallel):
            lay_out_state(self.optimizer)

    def bucket_sizes(self, caps_mb: Sequence[float]) -> list[float]:
        """Of several sizes those that come to different buckets; none: DDP reduces no gradients here."""
        if not isinstance(self._model, DistributedDataParallel):
            return []
        return different(caps_mb, [p for p in self.module.parameters() if p.requires_grad])

    def gradient_order(self) -> tuple[int, ...]:
        """Trained parameters by their numbers, as the last step came to their gradients; (): the last one first."""
        assert isinstance(self._model, DistributedDataParallel), "DDP has taken the step"
        order = gradient_order(self._model)
        return () if order == list(range(len(order)))[::-1] else tuple(order)

    def choose_buckets(self, choice: BucketChoice) -> None:
        """Reduce in these buckets from the next step on; every rank calls it after the same step."""
        is_other, self.bucket_choice = choice.layout != self._layout, choice
        self._layout = choice.layout
        if is_other and isinstance(self._model, DistributedDataParallel):
            self._replicate_again()

    def _state_beside(self) -> StateTree:
        found = super()._state_beside()
        return found if self.bucket_choice is None else found | {"buckets": self.bucket_choice.to_save()}

    def _load_state_beside(self, tree: StateTree) -> None:
        super()._load_state_beside(tree)
        if self._plan.replicate.tunes_buckets and "buckets" in tree:
            self.bucket_choice = BucketChoice.from_saved(tree["buckets"])  # followed when the next step begins
            if self.bucket_choice.is_settled:
                self.decisions.append(said_of(self.bucket_choice, self._session.world_size))

    def _pass_and_update(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        return self._finish_step(self._pass_explained(microbatches, measure), measure)

    def _pass_explained(self, microbatches: Sequence[Microbatch], measure: bool) -> Passed:
        try:
            return self._pass_all(microbatches, measure)
        except RuntimeError as error:
            explain(error, self._session.rank)
            raise

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        """The scope of a micro-batch: only the last reduces gradients; a stand-in changes no BatchNorm statistics."""
        holds = not synchronizes and isinstance(self._model, DistributedDataParallel)
        if holds and self._model.static_graph:  # learnt in a first pass that reduces; no other pass may differ
            holds = False
        with super()._special_scope(micro, synchronizes), self._model.no_sync() if holds else nullcontext():  # type: ignore[operator]
            yield

    def forget_step(self) -> None:
        self._in_step = False
        if self._low is not None:
            self._low.forget()
        self._forget_gradients()
        if self._scaler is not None:
            forget_unscaled(self._scaler)

    def _finish_step(self, passed: Passed, measure: bool) -> StepOutput:
        is_whole = passed.weight is None and self._low is None
        loss = passed.loss if is_whole else self._finish_passes(passed)
        return StepOutput(loss, self._update(measure), passed.metrics)

    def _finish_passes(self, passed: Passed) -> torch.Tensor | float:
        """The loss and the gradients of the whole global batch, whose weight is known only now."""
        if self._low is not None:
            self._low.take_gradients()
        if passed.weight is None:
            return passed.loss
        counted = passed.weight.detach().double() * self.owns_metrics
        factor = self._unit / self._session.sum("loss weight", counted)
        grads = [local(p.grad) for p in self._parameters if p.grad is not None]
        if grads:  # a stage may have no trained parameter
            foreach_mul_(grads, factor.to(grads[0].device))  # on the host if they are offloaded
        loss = passed.loss * (factor if self._moves else factor.item())
        if self._checks_loss and not math.isfinite(loss):  # a mean over no target at all
            raise NonFiniteLoss(float(loss))
        return loss

    def close(self) -> None:
        """Restore the user's model, with its new weights; sharded parameters stay sharded."""
        try:
            self._restore_layers()
        finally:
            super().close()
