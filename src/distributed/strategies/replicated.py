"""Replicated: every rank holds a replica of the model, and DDP reduces the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed.comm.compression.feedback import FEEDBACK
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box
from distributed.strategies.base import Outcome, StateTree, StepOutput, StepTask
from distributed.strategies.checks.elementwise import needs_closure
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.checks.parameter_hooks import refuse_hooks
from distributed.strategies.checks.sparse_layers import refuse_sparse
from distributed.strategies.data_parallel.auto.auto_compression import AutoCompression
from distributed.strategies.data_parallel.auto.making import step_compression
from distributed.strategies.data_parallel.ddp import own_buffers, why_not_captured
from distributed.strategies.data_parallel.gradient_buckets import GradientBuckets
from distributed.strategies.data_parallel.step_compression import StepCompression
from distributed.strategies.data_parallel.whole_batch import WholeBatch
from distributed.strategies.model.compiled_call import CompiledCall
from distributed.strategies.speed.bf16_parameters import Bf16Parameters
from distributed.strategies.speed.memory_format import lay_out_state
from distributed.strategies.steps.manual_steps import ManualSteps
from distributed.strategies.steps.mesh_step import MeshStep
from distributed.strategies.steps.microbatches import Passed


class Replicated(MeshStep):
    """The step of ranks with a replica each, which can be captured as a CUDA graph."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._restore_blocks: Callable[[], None] = lambda: None
        self._buckets: GradientBuckets | None = None  # while the step of several ranks may be captured
        self._buffers_at_first: list[torch.Tensor] | None = None
        self._manual: ManualSteps | None = None  # if the task makes gradients and steps itself
        self.why_not_captured = ""
        self._compression: StepCompression | None = None  # if less than the gradients is sent
        self.choosing: AutoCompression | None = None  # makes choices while the run goes on

    def setup(self, task: StepTask, session: Session) -> None:
        super().setup(task, session)
        self._take_step = self._pass_and_update
        if self._phases:
            self._take_step = self._take_phases
        elif task.is_manual:
            self._step_manually()
        elif needs_closure(self.optimizer):
            self._take_step = self._closure_step
        self.why_not_captured = self._why_not_captured()
        if self._plan.trains and not session.is_dry:
            self._compress()
        if self._ranks > 1 and not self._plan.trains:
            from distributed.strategies.model.materialize import check_alike, send_weights  # takes long to import

            check_alike(self.module, session)
            send_weights(self.module, session)
        elif self._ranks > 1 and not session.is_dry:
            self._share_gradients()
            self._check_reduction()
            self._lay_out_state()
        if self._compression is not None:
            self._compression.follow(self.module)  # whose parameters DDP may have laid out otherwise
            self.decisions += self._compression.decisions()

    def _why_not_captured(self) -> str:
        if self._phases:
            return "several optimizers step one after the other"
        if self._manual is not None:
            return "manual_optimization: the task steps by itself"
        if needs_closure(self.optimizer):
            return f"{type(self.optimizer).__name__} calls the model by a closure, as often as its losses say"
        return why_not_captured(self._plan) if self._ranks > 1 else ""

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
        # Where an abort could corrupt tensors in flight, weights that are alike are not sent again.
        is_alike = session.gate is not None and session.begins_alike
        if self._phases:
            self._replicate_phases(is_alike)
            return
        if self._manual is not None:
            self._send_model(is_alike)
            return
        if self.why_not_captured or session.device.type != "cuda":
            self._model = self._replicate(is_alike=is_alike)
            return
        self._send_model(is_alike)
        self._buckets = GradientBuckets(self.module, self._plan.replicate, session, sends_buffers=self._buffers_differ)
        self._check_reduced = self._buckets.reduce

    def _compress(self) -> None:
        """Send less than the gradients, if the plan says so."""
        self._compression = compression = step_compression(self._plan, self._session, self._scaler, self._stepped)
        if compression is None:
            return
        self._keeps_small = compression.keeps_small
        self._update = compression.around(self._update)  # type: ignore[assignment, method-assign]
        self._clip_now = compression.before(self._clip_now)  # type: ignore[assignment, method-assign]
        if compression.weighs:
            self._note_weight = lambda weight, micro: compression.weigh(weight, micro, self._model, self._unit)
        if isinstance(compression, AutoCompression):
            compression.begin(self.module)
            self._take_step = compression.watching(self._take_step, self._send_whole)
            self.choosing = compression

    def _send_whole(self) -> None:
        """Compression is over for good: nothing more of it is called, and DDP reduces by itself."""
        del self._update, self._clip_now  # which then are the methods again
        self._note_weight = None
        self._take_step = self._pass_and_update
        self._replicate_again()

    def _stepped(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The optimizer's parameters, by those of the model that others step for."""
        return self._low.stepped() if isinstance(self._low, Bf16Parameters) else {}

    def _replicate(self, *, group: dist.ProcessGroup | None = None, is_alike: bool = False) -> nn.Module:
        model = super()._replicate(group=group, is_alike=is_alike)
        if self._compression is not None:
            self._compression.attach(model)
        return model

    def _send_model(self, is_alike: bool) -> None:
        """Rank 0's weights to all ranks, where no DDP module does so; `is_alike`: all have them already."""
        from distributed.strategies.model.materialize import check_alike, send_weights  # takes long to import

        check_alike(self.module, self._session)
        if not is_alike:
            send_weights(self.module, self._session)

    def _step_manually(self) -> None:
        """Let the task's calls make gradients and steps."""
        session = self._session
        if session.world_size > 1:
            refuse_sparse(self.module, "manual_optimization", "its steps reduce dense gradients")
            refuse_hooks(self.module, "manual_optimization")
        self._is_settled, self._changes = True, None  # its steps change parameters between forward passes
        self._manual = ManualSteps(self.module, self.optimizer, self._plan, session, checks_loss=self._checks_loss)
        self._take_step = self._manual_step

    def _replicate_phases(self, is_alike: bool) -> None:
        """A DDP module for each phase, made while only its parameters require gradients."""
        for phase in self._phases:
            with self._in_phase(phase):
                phase.model = self._model = self._replicate(is_alike=is_alike)
                self._check_reduction()
                phase.check_reduced = self._check_reduced
            is_alike = True  # the first one has sent the weights of all
        lay_out_state(self.optimizer)

    def parameters_changed(self) -> None:
        if self._manual is not None and self.is_by_hand:
            return  # the loop says itself which of its optimizers step, and by which gradients
        super().parameters_changed()
        if self._compression is not None:
            self._compression.follow(self.module)
        if self._ranks == 1 or self._session.is_dry:
            return
        if self._buckets is not None:
            sends = self._buffers_differ
            self._buckets = GradientBuckets(self.module, self._plan.replicate, self._session, sends_buffers=sends)
            self._check_reduced = self._buckets.reduce
        else:
            self._replicate_again()

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
        return self._take_step(microbatches, measure)

    def _closure_step(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """A step whose optimizer evaluates the loss as often as it likes; all ranks see the same losses and gradients.

        What is reported is the first evaluation, at the weights before the step.
        """
        first: StepOutput | None = None

        @torch.enable_grad()
        def evaluate() -> torch.Tensor:
            nonlocal first
            self._forget_gradients()
            measures = measure and first is None
            passed = self._pass_explained(microbatches, measures)
            loss = self._finish_passes(passed)
            if self._hooks_of_parameters is not None:
                self._hooks_of_parameters.call()
            if first is None:
                first = StepOutput(loss, self._finish_gradients(measures), passed.metrics)
            self._is_torn = True
            whole = torch.as_tensor(loss, dtype=torch.float64, device=self._session.device).detach().clone()
            return self._session.sum("loss of a closure", whole) / self._ranks

        self._stepper.step(evaluate)
        self._forget_gradients()
        self._is_torn = self._in_step = False
        assert first is not None, "the optimizer has not called its closure"
        return first

    def _manual_step(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """A step whose task calls backward and the optimizers itself."""
        manual, (micro,) = self._manual, microbatches
        assert manual is not None
        self._agree_on_buffers()  # as DDP does before a step
        manual.measures = measure
        shares = self._whole_batch.of(micro.size) if self._whole_batch is not None else nullcontext()
        uncompiled = self.compiled is not None and micro.size < self.compiled.least
        try:
            with nullcontext() if micro.size else self._special_scope(micro, True), shares:
                with self.compiled.off() if self.compiled is not None and uncompiled else nullcontext():
                    outcome, loss = self._pass_manual(manual, micro)
        finally:
            self._is_torn = manual.has_stepped
            self._task.steps_by(None)
        metrics = self._task.measure(outcome, micro.size) if measure and micro.size else None
        self._is_torn = self._in_step = False
        return StepOutput(loss, manual.norm(), metrics)

    def _pass_manual(self, manual: ManualSteps, micro: Microbatch) -> tuple[Outcome, torch.Tensor | float]:
        """Run the user's step; returns what it has returned, or else the sum of the losses of its backward passes."""
        manual.begin(micro)
        self._task.steps_by(manual)
        outcome = self._forward(self.module, self.moved(micro.batch))
        manual.end()
        if outcome.is_missing:
            losses = [*manual.losses, torch.zeros((), device=self._session.device)]
            return outcome, self._value_of(torch.stack(losses).sum())
        weight = None if outcome.weight is None else outcome.weight.detach() * bool(micro.size)
        passed = Passed(self._value_of(self._part_of(micro, outcome).detach()), weight, None)
        return outcome, self._finish_passes(passed)

    def check_targets(self) -> None:
        super().check_targets()
        if self._manual is not None:
            self._manual.check()

    def _begin_step(self) -> None:
        super()._begin_step()
        if self._compression is not None:
            self._compression.begin_step()
        if self._buffers_differ and self._buffers_at_first is None:
            self._buffers_at_first = [buffer.detach().clone() for buffer in self._own_buffers()]

    def _own_buffers(self) -> list[torch.Tensor]:
        """The buffers that may differ between ranks."""
        return list(own_buffers(self.module, self._normalizes))

    def parts(self) -> Mapping[str, Any]:
        given = {"loss": self._task.loss_fn, "metrics": self._task.step_metrics}
        named = {name: part for name, part in given.items() if part is not None}
        return {"model": self.module} | named | self._task.own_code()

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
        return found if self._compression is None else found | self._compression.state()

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        if self._compression is None or not name.startswith(f"{FEEDBACK}/"):
            return super().shard_ranges(name, shape)
        return self._compression.shard_ranges(name, shape)

    def load_state(self, tree: StateTree) -> None:
        with self._whole():
            whole = self.module.state_dict() if self._saved is not None else {}
            super().load_state(tree | {"model": whole | tree["model"]})
        if self._compression is not None:
            self._compression.load(tree)

    def held_state(self) -> StateTree | None:
        """The state in memory; if buffers may differ between ranks and have changed, only rank 0 has it.

        None if each rank keeps what it has not sent: that of a lost rank is in the checkpoint alone.
        """
        if self._compression is not None and self._compression.keeps:
            return None
        held = super().held_state()
        if not self._buffers_differ or self._session.is_main:
            return held
        if self._buffers_at_first is None:  # before the first step of a world all ranks have the same
            return held
        now, first = self._own_buffers(), self._buffers_at_first
        return held if len(now) == len(first) and all(map(torch.equal, now, first)) else None

    def _copied_names(self) -> set[str]:
        found = super()._copied_names()
        return found if self._saved is None else found & self._saved

    def close(self) -> None:
        try:
            self._restore_blocks()
        finally:
            super().close()
