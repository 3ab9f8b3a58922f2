"""MicrobatchStep: forward and backward over micro-batches, which add up to the gradient of the global batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distributed.data.loading.loader import Microbatch
from distributed.strategies.base import MetricSum, NonFiniteLoss, Outcome, StepTask, add_sums
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.checks.parameter_hooks import refuse_new_hooks
from distributed.strategies.checks.torch_errors import explain_freed
from distributed.strategies.data_parallel.ddp import sees_its_share
from distributed.strategies.data_parallel.whole_batch import WholeBatch
from distributed.strategies.steps.evaluation_step import unless_empty
from distributed.strategies.steps.one_rank_step import OneRankStep


class Passed(NamedTuple):
    """The results of a step's forward and backward passes on this rank."""

    loss: torch.Tensor | float
    weight: torch.Tensor | None  # the count that the loss is a mean over, if that is not the number of samples
    metrics: Mapping[str, MetricSum] | None


class MicrobatchStep(OneRankStep):
    """The base of engines that run micro-batches in sequence, each with its own forward and backward pass."""

    _ranks: int  # data-parallel ones
    _keeps_small = False  # whether gradients pass through a precision with a small range
    _unit = 1.0  # the unit of a loss's weight
    _whole_batch: WholeBatch | None = None  # if samples are divided over ranks
    _changes: ForwardChanges | None = None  # of parameters, in the first steps
    _check_reduced: Callable[[], None] | None = None  # raises unless DDP has reduced all gradients of the step
    # Before each backward pass: the count that its loss is a mean over; None: its samples.
    _note_weight: Callable[[torch.Tensor | None, Microbatch], None] | None = None
    _normalizes = False  # whether BatchNorm is synchronized over all ranks
    _buffers_differ = False  # whether buffers may differ between ranks
    _data_groups: Sequence[dist.ProcessGroup | None] = (None,)  # over which the samples are divided; None: all ranks

    def train(self, mode: bool) -> None:
        if not mode:
            self._agree_on_buffers()
        super().train(mode)

    def _agree_on_buffers(self) -> None:
        """Broadcast the first data rank's buffers, for DDP, checkpoints and evaluation; all ranks must call it."""
        if not self._buffers_differ:
            return
        session = self._session
        buffers = [buffer for buffer in (*self.module.buffers(), *self._copied_buffers()) if not buffer.is_meta]
        sent = buffers if session.gate is None else [buffer.detach().clone() for buffer in buffers]
        for tensor in sent:
            for group in self._data_groups:
                with session.named("buffers of the first data rank"):
                    dist.broadcast(tensor, group=group, group_src=0)
        if session.gate is not None:  # an abort could leave anything in them
            torch.cuda.synchronize(session.device)
            session.check()
            with torch.no_grad():
                for buffer, tensor in zip(buffers, sent, strict=True):
                    buffer.copy_(tensor)

    def collect_statistics(self, microbatches: Sequence[Microbatch]) -> None:
        """Forward passes in training mode, by which BatchNorm collects statistics; nothing is trained."""
        with forward_only(self._task, is_whole=self._is_whole):
            for micro in microbatches:
                batch = self.moved(micro.batch)
                whole = nullcontext() if self._whole_batch is None else self._whole_batch.of(micro.size)
                with MicrobatchStep._special_scope(self, micro, False), whole:
                    self._collect(batch)
        torch.clear_autocast_cache()  # casts made without gradients would be used again with them

    def _collect(self, batch: Any) -> None:
        self._call(self._task.run, self.module, batch)

    def _pass_all(self, microbatches: Sequence[Microbatch], measure: bool) -> Passed:
        if self._changes is None:
            return self._pass_each(microbatches, measure)
        with self._watched_changes():
            return self._pass_each(microbatches, measure)

    @contextmanager
    def _watched_changes(self) -> Iterator[None]:
        """The scope of the passes of one of the first steps."""
        assert self._changes is not None
        with self._changes.watching():
            yield
        refuse_new_hooks(self.module)
        if self._changes.is_done:
            self._changes = None

    def _pass_each(self, microbatches: Sequence[Microbatch], measure: bool) -> Passed:
        loss: torch.Tensor | float = 0.0
        total: torch.Tensor | None = None
        logged: dict[str, MetricSum] = {}
        last = len(microbatches) - 1
        for index, micro in enumerate(microbatches):
            if index == last and micro.size:
                outcome, part = self._pass(micro)
            else:
                with self._special_scope(micro, index == last):
                    outcome, part = self._pass(micro)
            loss = loss + part if index else part
            if outcome.weight is not None:
                weight = outcome.weight if micro.size else outcome.weight * 0
                total = weight if total is None else total + weight
            if measure and index < last and outcome.logged and micro.size:  # of the last one all is measured
                add_sums(logged, self._task.measure_logged(outcome, micro.size))
        if self._check_reduced is not None:  # before any other collective: another rank may wait for gradients
            self._check_reduced()
        if measure and micro.size:
            add_sums(logged, self._task.measure(outcome, micro.size))
        return Passed(loss, total, logged if measure else None)

    def check_targets(self) -> None:
        """After a step, which does not count if this raises: its targets, or those that an abort made of them."""
        try:
            self._task.check_targets()
        except Exception:
            self._in_step = True
            raise

    def _pass(self, micro: Microbatch) -> tuple[Outcome, torch.Tensor | float]:
        """Run forward and backward over one micro-batch; returns its part of the loss."""
        if self.compiled is not None and micro.size < self.compiled.least:
            with self.compiled.off():
                return self._pass_whole(micro)
        return self._pass_whole(micro)

    def _pass_whole(self, micro: Microbatch) -> tuple[Outcome, torch.Tensor | float]:
        if self._whole_batch is None:
            return self._pass_share(micro)
        with self._whole_batch.of(micro.size):
            return self._pass_share(micro)

    def _pass_share(self, micro: Microbatch) -> tuple[Outcome, torch.Tensor | float]:
        batch = self.moved(micro.batch) if self._moves else micro.batch
        self._task.samples = micro.size
        outcome = self._forward(self._model, batch)
        if not self._is_settled:
            outcome = self._settle(outcome, batch, micro.size)
        if self._keeps_small and outcome.weight is not None:
            self._choose_unit(outcome.weight)
        part = self._part_of(micro, outcome)
        value = self._value_of(part)
        if self._note_weight is not None:
            self._note_weight(outcome.weight, micro)
        self.clock.mark()
        try:
            self._backward(part)
        except RuntimeError as failed:
            if not self._is_whole:
                explain_freed(failed)
            raise
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
            if self._has_shares and micro.size:
                self._task.check_share(outcome, micro.size)
            part = part if micro.weight == 1.0 else part * micro.weight
        return part if micro.size else part.nan_to_num(0.0)  # a stand-in's loss has weight 0, even if it is NaN

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        """The scope of a stand-in, or of a micro-batch that is not the last: it changes no BatchNorm statistics."""
        unsynced = [] if micro.size or self._normalizes else [m for m in self.module.modules() if sees_its_share(m)]
        for module in unsynced:
            module.eval()  # does not update its running statistics
        try:
            yield
        finally:
            for module in unsynced:
                module.train()


class ForwardOnly:
    """What a manual step's calls go to where nothing is to be trained. Implements OptimizerCalls."""

    def backward(self, loss: torch.Tensor, weight: Any, *, retain_graph: bool) -> None:
        pass

    def step(self, name: str) -> None:
        pass

    def zero_grad(self, name: str) -> None:
        pass


@contextmanager
def forward_only(task: StepTask, *, is_whole: bool) -> Iterator[None]:
    """A scope in which training steps train nothing, and what the task keeps of its own stays as it is.

    `is_whole`: whether this rank has the whole model. A step of the user's own, which may ask for gradients by itself
    (a penalty on them), then has a graph.
    """
    kept = copy.deepcopy(task.state()) if task.keeps_state else None
    task.steps_by(ForwardOnly())
    try:
        with torch.set_grad_enabled(is_whole and task.has_own_step):
            yield
    finally:
        task.steps_by(None)
        if kept is not None:
            task.load_state(kept)
