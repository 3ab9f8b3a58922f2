"""Replicated: every rank holds a replica of the model, and DDP reduces the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.torch_module_compat import forget_unscaled
from distributed.strategies.base import StateTree, StepOutput, StepTask
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.data_parallel.ddp import own_buffers, why_not_captured
from distributed.strategies.data_parallel.gradient_buckets import GradientBuckets
from distributed.strategies.data_parallel.whole_batch import WholeBatch
from distributed.strategies.mesh_step import MeshStep
from distributed.strategies.model.compiled_call import CompiledCall


class Replicated(MeshStep):
    """The step of ranks with a replica each, which can be captured as a CUDA graph."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._restore_blocks: Callable[[], None] = lambda: None
        self._buckets: GradientBuckets | None = None  # while the step of several ranks may be captured
        self._buffers_at_first: list[torch.Tensor] | None = None
        self.why_not_captured = ""

    def setup(self, task: StepTask, session: Session) -> None:
        super().setup(task, session)
        if self._ranks > 1 and not session.is_dry:
            self._share_gradients()
            self._check_reduction()
            self._lay_out_state()

    def _prepare_model(self, task: StepTask) -> None:
        """Set up the model; slow imports are made only if they are needed."""
        self._add_lora()
        if any(tensor.is_meta for tensor in (*self.module.parameters(), *self.module.buffers())):
            from distributed.strategies.model.preparation import make

            make(self.module, self._plan, self._session)
        self._use_float8()
        if self._plan.memory.recompute or self._plan.memory.compile:
            from distributed.strategies.model.preparation import prepare_blocks

            self._restore_blocks = prepare_blocks(self.module, self._plan)
            if self._plan.memory.compile_whole:
                self.compiled = CompiledCall(self.module, self._plan.batch.micro_batch // self._plan.batch.ranks)
        task.move_to(self._session.device)

    def _share_batch(self) -> WholeBatch | None:
        is_shared = self._session.world_size > 1 and self._ranks > 1
        return WholeBatch(normalizes=self._normalizes) if is_shared else None

    def _watch_changes(self) -> ForwardChanges:
        return ForwardChanges(self.module, (None,), self._session, is_sharded=False)

    def _share_gradients(self) -> None:
        """Set up the reduction: by DDP, or after the backward pass while the step may be captured."""
        session = self._session
        self.why_not_captured = why_not_captured(self._plan)
        # Where an abort could corrupt tensors in flight, weights that are alike are not sent again.
        is_alike = session.gate is not None and session.begins_alike
        if self.why_not_captured or session.device.type != "cuda":
            self._model = self._replicate(is_alike=is_alike)
            return
        from distributed.strategies.model.materialize import check_alike, send_weights  # takes long to import

        check_alike(self.module, session)
        if not is_alike:
            send_weights(self.module, session)
        self._buckets = GradientBuckets(self.module, self._plan.replicate, session, sends_buffers=self._buffers_differ)
        self._check_reduced = self._buckets.reduce

    def stay_eager(self) -> None:
        if self._buckets is None:
            return
        self._buckets = None
        self._model = self._replicate(is_alike=self._session.gate is not None)  # in the middle of a run
        self._check_reduced = None
        self._check_reduction()

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """One optimizer step over one or more micro-batches; `measure` adds metrics and the gradient's norm."""
        self.clock.begin(measure)
        output = self.step(microbatches, measure)
        if measure:
            self.check_targets()
        return output

    def step(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """The step itself, without synchronization on a GPU, so that it can be captured as a CUDA graph."""
        self._begin_step()
        if self._buckets is not None:
            self._buckets.send_buffers()
        return self._finish_step(self._pass_explained(microbatches, measure), measure)

    def _begin_step(self) -> None:
        super()._begin_step()
        if self._buffers_differ and self._buffers_at_first is None:
            self._buffers_at_first = [buffer.detach().clone() for buffer in self._own_buffers()]

    def _own_buffers(self) -> list[torch.Tensor]:
        """The buffers that may differ between ranks."""
        return list(own_buffers(self.module, self._normalizes))

    def forget_step(self) -> None:
        self._in_step = False
        if self._low is not None:
            self._low.forget()
        self._forget_gradients()
        if self._scaler is not None:
            forget_unscaled(self._scaler)

    def parts(self) -> Mapping[str, Any]:
        given = {"loss": getattr(self._task, "loss_fn", None), "metrics": getattr(self._task, "metrics", None)}
        return {"model": self.module} | {name: part for name, part in given.items() if part is not None}

    def changing(self) -> list[torch.Tensor]:
        """Every tensor that a step changes."""
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self._parameters, *(t for t in held if isinstance(t, torch.Tensor))]
        modules = [part for part in self.parts().values() if isinstance(part, nn.Module)]
        tensors += [buffer for module in modules for buffer in module.buffers()]
        if self._low is not None:
            tensors += self._low.tensors()
        if self._gate is not None:
            tensors += self._gate.tensors()
        return tensors + self._scaler_tensors()

    def state(self) -> StateTree:
        self._agree_on_buffers()
        found = super().state()
        if self._saved is not None:
            found["model"] = {name: value for name, value in found["model"].items() if name in self._saved}
        return found

    def load_state(self, tree: StateTree) -> None:
        with self._whole():
            whole = self.module.state_dict() if self._saved is not None else {}
            super().load_state(tree | {"model": whole | tree["model"]})

    def held_state(self) -> StateTree | None:
        """The state in memory; if buffers may differ between ranks and have changed, only rank 0 has it."""
        held = super().held_state()
        if not self._buffers_differ or self._session.is_main:
            return held
        if self._buffers_at_first is None:  # before the first step of a world all ranks have the same
            return held
        now, first = self._own_buffers(), self._buffers_at_first
        return held if len(now) == len(first) and all(map(torch.equal, now, first)) else None

    def close(self) -> None:
        try:
            self._restore_blocks()
        finally:
            super().close()
