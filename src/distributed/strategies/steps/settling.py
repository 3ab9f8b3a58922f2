"""LossSettling: how a strategy lets a task find out what its loss is a mean over, once in a world.

Some of it takes trial passes, which leave no trace in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from distributed.core.protocol.failure import is_collateral
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import preserved_versions
from distributed.strategies.base import LossTrial, Outcome, StepTask
from distributed.strategies.model.buffer_snapshot import BufferSnapshot, kept_buffers

T = TypeVar("T")
Step = Callable[[nn.Module, Any], Outcome]


class LossSettling:
    """The base of all steps, with what a trial needs of them."""

    module: nn.Module
    _task: StepTask
    _session: Session
    _loss: nn.Module | None = None  # if the loss is a module
    _is_settled = False  # whether the divisor of the loss's mean is known
    _has_shares = True

    def _forward(self, model: nn.Module, batch: Any) -> Outcome:
        """The outcome of a batch in training."""
        raise NotImplementedError

    def _call(self, step: Callable[[nn.Module, Any], T], model: nn.Module, batch: Any) -> T:
        """What a step of the task returns, in this run's precision."""
        raise NotImplementedError

    def moved(self, batch: Any) -> Any:
        """A batch on this rank's device."""
        raise NotImplementedError

    @property
    def _is_rough(self) -> bool:
        """Whether the model computes in low precision."""
        raise NotImplementedError

    def _settle(self, outcome: Outcome, batch: Any, size: int) -> Outcome:
        """Agree once per world on what the loss is a mean over, before any sum; every rank must call it."""
        self._is_settled = True
        settled = self._task.settle(outcome, batch, size, self._trial())
        assert settled is not None
        return settled

    def _trial(self) -> LossTrial:
        device, total = self._session.device, self._session.sum
        return LossTrial(
            agree=lambda votes: total("what the loss is a mean over", votes.to(device)).cpu(),
            matters=self._has_shares,
            module=self.module,
            run=self._try if self._is_whole else None,
            is_joint=False,
            is_rough=self._is_rough,
            beside=dict if self._task.keeps_state else self._task.own_code,  # what it keeps is restored
        )

    @property
    def _is_whole(self) -> bool:
        """Whether this rank can compute an outcome of the model without other ranks."""
        return True

    def _try(self, batch: Any, step: Step | None = None) -> Outcome:
        """An outcome computed without any effect on training; by a training step, or another one of the task."""
        task = self._task
        kept = copy.deepcopy(task.state()) if task.keeps_state else None
        modes = [(module, module.training) for module in self.module.modules()]
        devices = [self._session.device] if self._session.device.type == "cuda" else []
        before = BufferSnapshot(self.module)
        versions = tuple(buffer for buffer in before.buffers if not buffer.is_inference())
        self.module.eval()
        with preserved_versions(versions):  # of tensors that an earlier pass saved for backward
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=devices), kept_buffers(self._loss):
                    return self._forward(self.module, batch) if step is None else self._call(step, self.module, batch)
            finally:
                before.restore()
                for module, mode in modes:
                    module.training = mode
                if kept is not None:
                    task.load_state(kept)
                torch.clear_autocast_cache()  # casts made without gradients would be used again with them

    def _settle_before(self, micro: Microbatch) -> None:
        """Settle a model's own loss before its first pass: FSDP allows no trial between a pass and its backward.

        A model that has a loss only in training is settled by its first training pass, without a trial.
        """
        batch = self.moved(micro.batch)
        try:
            outcome = self._try(batch)
        except Exception as failed:  # the user's code, in a trial pass
            if is_collateral(failed):  # a peer is lost: no rank starts another collective
                raise
            return
        if outcome.is_own:
            self._is_settled = True
            trial = self._trial()._replace(run=self._try, is_joint=not self._is_whole)
            self._task.settle(outcome, batch, micro.size, trial)
