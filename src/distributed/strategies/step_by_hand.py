"""StepByHand: a step taken call by call, by a loop of the user's own, whose code are the passes of the model.

begin ─> scope of a micro-batch ─> [the user's forward] ─> backward ─┬─> finish
                ^────────────────────────────────────────────────────┘ all but the last
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distributed.data.loading.loader import Microbatch
from distributed.strategies.base import Outcome, StepOutput
from distributed.strategies.data_parallel.gradient_buckets import send_buffers
from distributed.strategies.microbatches import MicrobatchStep, Passed


class StepByHand(MicrobatchStep):
    """The base of strategies whose step has parts that can be called; every rank makes the same calls."""

    is_by_hand = False  # whether steps are taken so; set before `setup`
    _watching: ExitStack | None = None  # of a step that has begun
    _passed_loss: torch.Tensor | float = 0.0
    _passed_weight: torch.Tensor | None = None

    def open_step(self, *, measure: bool) -> None:
        """Begin a step, in which no parameter changes before `close_step`."""
        self._begin_step()
        self.clock.begin(measure)
        self._passed_loss, self._passed_weight = 0.0, None
        if self._buffers_differ:  # DDP would send them before the forward pass, which it does not see
            send_buffers(self.module, self._session)
        self._watching = ExitStack()
        if self._changes is not None:
            self._watching.enter_context(self._watched_changes())

    @contextmanager
    def scope(self, micro: Microbatch, *, is_last: bool) -> Iterator[Any]:
        """The scope of the user's passes over one micro-batch, which it returns on this rank's device."""
        with ExitStack() as scope:
            if not (is_last and micro.size):
                scope.enter_context(self._special_scope(micro, is_last))
            if self._whole_batch is not None:
                scope.enter_context(self._whole_batch.of(micro.size))
            scope.enter_context(self._autocast or nullcontext())
            yield self.moved(micro.batch)

    def backward(self, micro: Microbatch, loss: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Run a loss backward: a mean over the samples of this rank's share, or over `weight`."""
        part = self._part_of(micro, Outcome(loss, None, None, weight, is_own=True, is_given=True))
        value = self._value_of(part)
        self.clock.mark()
        with torch.autocast(self._session.device.type, enabled=False):
            if isinstance(self._model, DistributedDataParallel):
                part = self._model(part)  # whose forward prepares the reduction, and returns the loss as it is
            self._backward(part)
        self._passed_loss = self._passed_loss + value
        if weight is not None:
            counted = weight if micro.size else weight * 0
            self._passed_weight = counted if self._passed_weight is None else self._passed_weight + counted

    def close_step(self, *, measure: bool) -> StepOutput:
        """Reduce what is left to reduce, clip and step."""
        if self._check_reduced is not None:
            self._check_reduced()
        self.forget_scopes()
        return self._finish_step(Passed(self._passed_loss, self._passed_weight, None), measure)

    def forget_scopes(self) -> None:
        """Leave what `open_step` entered, also where the step is not closed."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def _finish_step(self, passed: Passed, measure: bool) -> StepOutput:
        raise NotImplementedError
