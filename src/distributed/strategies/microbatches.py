"""Passes: forward and backward over the micro-batches of a step, which add up to the gradient of the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from distributed.data.loader import Microbatch
from distributed.data.transfer import to_device
from distributed.strategies.base import MetricSum, NonFiniteLoss, Outcome
from distributed.strategies.forward_changes import ForwardChanges
from distributed.strategies.parameter_hooks import refuse_new_hooks
from distributed.strategies.replica import Replica, unless_empty
from distributed.strategies.replicated import sees_its_share
from distributed.strategies.whole_batch import WholeBatch


class Passed(NamedTuple):
    """What the passes of a step came to on this rank."""

    loss: torch.Tensor | float
    weight: torch.Tensor | None  # over how much the loss is a mean, where that is not the number of samples
    metrics: Mapping[str, MetricSum] | None


class Passes(Replica):
    """What engines share that take micro-batches one after the other, each with its own forward and backward pass."""

    _ranks: int  # data-parallel ones
    _keeps_small = False  # whether gradients pass through a precision that does not hold large numbers
    _unit = 1.0  # a loss's weight is counted in these
    _whole_batch: WholeBatch | None = None  # where samples are shared out over ranks
    _changes: ForwardChanges | None = None  # of parameters, in the first steps
    _check_reduced: Callable[[], None] | None = None  # raises unless DDP has reduced all gradients of the step
    _normalizes = False  # whether BatchNorm sees the samples of all ranks
    _buffers_differ = False  # whether those of the ranks may
    _data_groups: Sequence[dist.ProcessGroup | None] = (None,)  # over which the samples are shared out; None: all ranks

    def train(self, mode: bool) -> None:
        if not mode:
            self._agree_on_buffers()
        super().train(mode)

    def _agree_on_buffers(self) -> None:
        """The first data rank's are those that count, for DDP, checkpoints and evaluation. Every rank comes here."""
        if self._buffers_differ:
            for buffer in self.module.buffers():
                for group in self._data_groups if not buffer.is_meta else ():
                    dist.broadcast(buffer, group=group, group_src=0)

    def _pass_all(self, microbatches: Sequence[Microbatch], measure: bool) -> Passed:
        if self._changes is None:
            return self._pass_each(microbatches, measure)
        with self._watched_changes():
            return self._pass_each(microbatches, measure)

    @contextmanager
    def _watched_changes(self) -> Iterator[None]:
        """Around the passes of one of the first steps."""
        assert self._changes is not None
        with self._changes.watching():
            yield
        refuse_new_hooks(self.module)
        if self._changes.is_done:
            self._changes = None

    def _pass_each(self, microbatches: Sequence[Microbatch], measure: bool) -> Passed:
        loss: torch.Tensor | float = 0.0
        total: torch.Tensor | None = None
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
                total = weight if total is None else total + weight
        if self._check_reduced is not None:  # before anything else is sent: another rank may wait for gradients
            self._check_reduced()
        metrics = None
        if measure and micro.size:
            metrics = self._task.measure(outcome, micro.size)
        return Passed(loss, total, metrics)

    def check_targets(self) -> None:
        self._task.check_targets()

    def _pass(self, micro: Microbatch) -> tuple[Outcome, torch.Tensor | float]:
        """Forward and backward over one micro-batch, and its part of the loss."""
        if self._whole_batch is None:
            return self._pass_share(micro)
        with self._whole_batch.of(micro.size):
            return self._pass_share(micro)

    def _pass_share(self, micro: Microbatch) -> tuple[Outcome, torch.Tensor | float]:
        batch = to_device(micro.batch, self._session.device) if self._moves else micro.batch
        outcome = self._task.run(self._model, batch) if self._autocast is None else self._forward(self._model, batch)
        if not self._is_settled:
            outcome = self._settle(outcome, batch, micro.size)
        if self._keeps_small and outcome.weight is not None:
            self._choose_unit(outcome.weight)
        part = self._part_of(micro, outcome)
        value = self._value_of(part)
        self.clock.mark()
        self._backward(part)
        return outcome, value

    def _choose_unit(self, weight: torch.Tensor) -> None:
        """Near the weight of a first micro-batch of all ranks. A power of two, so that it changes no digit of a sum."""
        whole = float(self._session.sum("loss weight", weight.detach().double()).item())
        self._unit = 2.0 ** round(math.log2(whole)) if whole > 0 else 1.0
        self._keeps_small = False

    def _value_of(self, part: torch.Tensor) -> torch.Tensor | float:
        value = part.detach() if self._moves else part.item()
        if self._checks_loss and not math.isfinite(value):
            raise NonFiniteLoss(float(value))
        return value

    def _part_of(self, micro: Microbatch, outcome: Outcome) -> torch.Tensor:
        """A micro-batch's part of the loss, such that the mean over the data ranks of their sums is the loss."""
        part = outcome.loss
        if outcome.weight is not None:
            factor = self._ranks / self._unit if micro.size else 0
            part = unless_empty(part, outcome.weight) * (outcome.weight * factor)
        elif outcome.is_sum:
            part = part * (self._ranks if micro.size else 0)
        else:
            if micro.size:
                self._task.check_share(outcome, micro.size)
            part = part if micro.weight == 1.0 else part * micro.weight
        return part if micro.size else part.nan_to_num(0.0)  # a stand-in's loss has weight 0, whatever it is

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        """Around a micro-batch that does not end its step, or is a stand-in: it leaves no trace in BatchNorm."""
        unsynced = [] if micro.size or self._normalizes else [m for m in self.module.modules() if sees_its_share(m)]
        for module in unsynced:
            module.eval()  # keeps its running statistics as they are
        try:
            yield
        finally:
            for module in unsynced:
                module.train()
