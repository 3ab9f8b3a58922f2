"""StepByHand: a step taken call by call, by a loop of the user's own, whose code are the passes of the model.

begin ─> scope of a micro-batch ─> [the user's forward] ─> backward ─┬─> finish
                ^────────────────────────────────────────────────────┘ all but the last
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.core.errors import TaskError
from distributed.data.loading.loader import Microbatch
from distributed.strategies.base import Outcome, StepOutput
from distributed.strategies.checks.parameter_hooks import hooked_parameters
from distributed.strategies.data_parallel.gradient_buckets import send_buffers
from distributed.strategies.data_parallel.sparse_gradients import clip
from distributed.strategies.steps.manual_steps import ManualSteps
from distributed.strategies.steps.microbatches import Passed
from distributed.strategies.steps.phases import PhasedStep

_NOTHING = nullcontext()


class StepByHand(PhasedStep):
    """The base of strategies whose step has parts that can be called; every rank makes the same calls."""

    is_by_hand = False  # whether steps are taken so
    _manual: ManualSteps | None = None  # if several optimizers step, each when the loop says so
    _watching: ExitStack | None = None  # of a step that has begun
    _passed_loss: torch.Tensor | float = 0.0
    _passed_weight: torch.Tensor | None = None
    _norm: torch.Tensor | None = None  # of gradients that the loop clips itself
    _clip_later: float | None = None  # to which, where that needs all ranks
    _gathered: tuple[nn.Parameter, Any, int] | None = None  # a gradient of a step's first micro-batches, as it was

    def take_steps_by_hand(self) -> None:
        """Called before `setup`, where a loop takes the steps of a run part by part."""
        self.is_by_hand = True

    def train(self, mode: bool) -> None:
        """A loop of the user's own may have put modules to eval mode; where all are, it has evaluated."""
        modes = {part: part.training for part in self.module.modules()} if self.is_by_hand and mode else {}
        super().train(mode)
        if any(was for part, was in modes.items() if not [*part.children()]):
            for part, was in modes.items():
                part.training = was

    def open_step(self, *, measure: bool) -> None:
        """Begin a step, in which no parameter changes before `close_step`. One that was not closed leaves nothing."""
        if self._in_step and self._manual is None:
            self.forget_step()
        self._norm = self._clip_later = None
        self._begin_step()
        self.clock.begin(measure)
        if self._manual is not None:
            self._manual.measures = measure
        self._passed_loss, self._passed_weight, self._gathered = 0.0, None, None
        if self._buffers_differ:  # DDP would send them before the forward pass, which it does not see
            send_buffers(self.module, self._session)
        if self._changes is not None:
            self._watching = ExitStack()
            self._watching.enter_context(self._watched_changes())

    @contextmanager
    def scope(self, micro: Microbatch, *, is_last: bool) -> Iterator[Any]:
        """The scope of the user's passes over one micro-batch, which it returns on this rank's device."""
        if self._manual is not None:
            self._manual.begin(micro)
        if is_last and micro.size and self._autocast is None:
            with self._whole_batch.of(micro.size) if self._whole_batch is not None else _NOTHING:
                yield self.moved(micro.batch)
            return
        with ExitStack() as scope:
            if not (is_last and micro.size):
                scope.enter_context(self._special_scope(micro, is_last))
            if self._whole_batch is not None:
                scope.enter_context(self._whole_batch.of(micro.size))
            scope.enter_context(self._autocast or nullcontext())
            yield self.moved(micro.batch)

    def backward(self, micro: Microbatch, loss: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Run a loss backward: a mean over the samples of this rank's share, or over `weight`."""
        if self._manual is not None:
            self._manual.refuse_leftovers()
            self._manual.backward(loss, weight, retain_graph=False)
            return
        self._refuse_dropped()
        part = self._part_of(micro, Outcome(loss, None, None, weight, is_own=True, is_given=True))
        value = self._value_of(part)
        if self._note_weight is not None:
            self._note_weight(weight, micro)
        self.clock.mark()
        device = self._session.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING:
            if isinstance(self._model, DistributedDataParallel):
                part = self._model(part)  # whose forward prepares the reduction, and returns the loss as it is
            self._backward(part)
        if self._plan.batch.most_accumulated > 1:
            held = ((parameter, parameter.grad) for parameter in self._parameters)
            self._gathered = next(((p, grad, grad._version) for p, grad in held if grad is not None), None)
        self._passed_loss = self._passed_loss + value
        if weight is not None:
            counted = weight if micro.size else weight * 0
            self._passed_weight = counted if self._passed_weight is None else self._passed_weight + counted

    def _refuse_dropped(self) -> None:
        """Raise if the gradients of this step's earlier micro-batches are gone."""
        if self._gathered is None:
            return
        first, gradient, version = self._gathered
        if gradient._version == version and first.grad is gradient:  # so nothing waits for the device
            return
        if all(p.grad is None or not p.grad.any() for p in self._parameters):
            raise TaskError(
                "the gradients of a step's first batches were dropped before its last one",
                why=f"a step has those of gradient_accumulation_steps={self._plan.batch.most_accumulated} batches",
                do="leave zero_grad() out: run.step drops the gradients after the step",
            )

    def step_one(self, name: str) -> None:
        """Reduce the gradients of one of several optimizers, clip them, step, and drop them."""
        assert self._manual is not None
        self._manual.step(name)
        self._is_torn = True
        self._manual.zero_grad(name)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of this step; their norm, which of a sharded model is NaN until the step is taken."""
        if self._plan.is_replicated and self._low is None and not hooked_parameters(self.module):
            self._norm = self._clip_now(max_norm)
        else:
            self._norm = torch.full((), math.nan, device=self._session.device)
            self._clip_later = max_norm
        return self._norm

    def _clip_now(self, max_norm: float) -> torch.Tensor:
        if self._check_reduced is not None:
            self._check_reduced()
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            norm = clip(gradients, max_norm)
            assert norm is not None
            return norm
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def close_step(self, *, measure: bool) -> StepOutput:
        """Reduce what is left to reduce, clip and step."""
        if self._manual is not None:
            return self._close_manual(self._manual)
        if self._check_reduced is not None:
            self._check_reduced()
        self.forget_scopes()
        passed = Passed(self._passed_loss, self._passed_weight, None)
        norm, later = self._norm, self._clip_later
        self._norm = self._clip_later = None
        if norm is None:
            return self._finish_step(passed, measure)
        if later is None:
            return self._finish_step(passed, False)._replace(gradient_norm=norm if measure else None)
        planned, self._clip_norm = self._clip_norm, later
        try:
            output = self._finish_step(passed, measure)
        finally:
            self._clip_norm = planned
        if output.gradient_norm is not None:
            norm.copy_(output.gradient_norm)
        return output

    def _close_manual(self, manual: ManualSteps) -> StepOutput:
        """After the batch of a loop with several optimizers, which have stepped."""
        manual.end(drops=False)
        self.forget_scopes()
        loss = self._value_of(torch.stack([*manual.losses, torch.zeros((), device=self._session.device)]).sum())
        self._is_torn = self._in_step = False
        return StepOutput(loss, manual.norm(), None)

    def forget_scopes(self) -> None:
        """Leave what `open_step` entered, also where the step is not closed."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def forget_step(self) -> None:
        """Drop the gradients of a step that was begun and is not completed."""
        raise NotImplementedError

    def _finish_step(self, passed: Passed, measure: bool) -> StepOutput:
        raise NotImplementedError
