"""StepInProgress: one step of a run as a loop of the user's own takes it, call by call.

for batch in batches():  at a batch ─ backward ─> it has gradients ─ take ─> the next batch, or taken with the last one
answer():                what the turn of the step is answered with; None: the loop has left it before it was taken
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from distributed.data.loading.loader import Microbatch
from distributed.strategies.base import StepOutput
from distributed.train.loop_parts.turns import Turn
from distributed.train.metrics import MetricTotals
from distributed.trainers.own_loop import misuses


class StepInProgress:
    """Of one turn. With several optimizers each of them steps when the loop says so, and the batch is a step."""

    def __init__(self, strategy: Any, turn: Turn, *, has_several: bool) -> None:
        """`has_several`: optimizers."""
        assert turn.microbatches is not None
        self._strategy, self._micros, self._has_several = strategy, turn.microbatches, has_several
        self.measures = turn.measures  # whether its numbers are looked at
        self.batch: Microbatch | None = None  # that the loop is at
        self.is_last = False  # of the step's batches
        self.passes = 0  # backward passes of all its batches
        self._passes_before = 0  # of those before this one
        self._is_to_close = False  # whether several optimizers have stepped, or could have
        self._output: StepOutput | None = None  # once it is taken
        self.logged = MetricTotals()

    @property
    def has_loss(self) -> bool:
        """Whether the loss of this batch went backward."""
        return self.passes > self._passes_before

    @property
    def size(self) -> int:
        """Samples of this batch; 0: it only keeps in step with the other ranks."""
        return 0 if self.batch is None else self.batch.size

    @property
    def is_taken(self) -> bool:
        return self._output is not None

    def batches(self, watched: Callable[[], AbstractContextManager[None]]) -> Iterator[Any]:
        """Those of this rank, each in the scope of its passes, and within `watched`."""
        self._strategy.open_step(measure=self.measures)
        try:
            for at, micro in enumerate(self._micros):
                self.is_last, self._passes_before = at == len(self._micros) - 1, self.passes
                with watched(), self._strategy.scope(micro, is_last=self.is_last) as moved:
                    self.batch = micro
                    yield moved
                if self._has_several:
                    self._is_to_close = True  # also where none has stepped
                elif not self.has_loss or (self.is_last and not self.is_taken):
                    raise misuses.missing_call("run.step" if self.has_loss else "run.backward")
        finally:
            self.batch = None
            self._strategy.forget_scopes()

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | None) -> None:
        if self.is_taken:
            raise misuses.backward_after_step()
        self._strategy.backward(self.batch, loss, weight)
        self.passes += 1

    def take(self) -> bool:
        """With the last batch, the step; whether it was."""
        if not self.has_loss or self.is_taken:
            raise misuses.step_before("the next batch" if self.has_loss else "run.backward")
        if self.is_last:
            self._output = self._strategy.close_step(measure=self.measures)
        return self.is_taken

    def take_one(self, optimizer: str) -> None:
        """That of one of several."""
        self._strategy.step_one(optimizer)
        self._is_to_close = True

    def answer(self) -> StepOutput | None:
        if self._is_to_close:
            self._output = self._strategy.close_step(measure=self.measures)
        if self._output is None or not self.measures:
            return self._output
        return self._output._replace(metrics=self.logged.sums)
