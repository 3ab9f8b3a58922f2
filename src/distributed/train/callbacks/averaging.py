"""WeightAveraging: an average of a model's weights beside the model, on each rank for its part of them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, ne
from typing import Any

import torch

from distributed.core.errors import Problem
from distributed.core.plan import Plan
from distributed.runtime.torch_compat import foreach_copy_, foreach_lerp_
from distributed.strategies.base import ModelCopy, StepTask
from distributed.strategies.model.copies import distinct, wide
from distributed.train.callbacks.callback import Callback, TrainingControl

_DTYPE = attrgetter("dtype")


class WeightAveraging(Callback):
    """The base of `EMA` and `SWA`: override `share` for a rule of your own.

    An average has all tensors of the model that an optimizer steps, and its buffers. The first update copies them, as
    `torch.optim.swa_utils.AveragedModel` does; later ones copy what has no mean. Averages of bf16 and fp16 are in fp32.

    >>> class Mean(WeightAveraging):
    ...     def share(self, run):
    ...         return 1 / (self.updates + 1) if run.is_last_step else None
    """

    keeps_copy = True
    evaluates = True  # whether the model is evaluated with the averages
    use_buffers = False  # whether buffers are averaged too, or copied

    def __init__(self) -> None:
        self.updates = 0
        self._kept: ModelCopy = {}  # the model's own, while the averages are in their place
        self._pairs: tuple[list[str], list[str]] | None = None  # names of what is averaged, and of what is copied

    def check(self, plan: Plan, task: StepTask, evaluates: bool) -> list[Problem]:
        meets = plan.replicate.synchronization.kind
        if meets == "every_step":
            return []
        what = f"{type(self).__name__} with synchronization={meets!r}"
        why = "a replica that steps alone has weights of its own, so each rank would have another average"
        return [Problem(what, why=why, do=f"set synchronization='every_step', or leave {type(self).__name__} out")]

    def share(self, run: TrainingControl) -> float | None:
        """After a step, how much the present weights count in the average, from 0 to 1; None: nothing is averaged."""
        raise NotImplementedError

    def on_fit_start(self, run: TrainingControl) -> None:
        self._kept, self._pairs = {}, None
        if not run.is_resumed or run.copy_of(self) is None:
            self.updates = 0
            run.keep_copy(self, None)

    def on_step_end(self, run: TrainingControl) -> None:
        share = self.share(run)
        if share is not None:
            self.update(run, share)

    def update(self, run: TrainingControl, share: float) -> None:
        """Take the present weights into the average; every rank must call it after the same step."""
        copy = run.copy_of(self)
        with run.weights() as live:
            if copy is None:
                run.keep_copy(self, _copied(live))
            else:
                self._average(copy, live, share, run)
        self.updates += 1

    def on_validation_start(self, run: TrainingControl) -> None:
        if self.evaluates:
            self.put_in(run)

    def on_validation_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None:
        self.take_out(run)

    def on_exception(self, run: TrainingControl, error: BaseException) -> None:
        if self._kept and run.is_replicated:  # else it takes other ranks, and this one can hand over nothing
            self.take_out(run)

    def put_in(self, run: TrainingControl) -> None:
        """Let the model have the averages, where there are any, until `take_out`; every rank must call it."""
        copy = run.copy_of(self)
        if copy is None:
            return
        with run.weights(changes=True) as live:
            for name in distinct(live):
                self._kept[name] = live[name].clone()
                live[name].copy_(copy[name])

    def take_out(self, run: TrainingControl) -> None:
        if not self._kept:
            return
        with run.weights(changes=True) as live:
            for name, value in self._kept.items():
                live[name].copy_(value)
        self._kept = {}

    def state(self) -> dict[str, Any]:
        return {"updates": self.updates} if self.updates else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.updates = state.get("updates", 0)

    def _average(self, copy: ModelCopy, live: ModelCopy, share: float, run: TrainingControl) -> None:
        if self._pairs is None:
            buffers = {name for name, _ in run.model.named_buffers()}
            names = distinct(live)
            plain = [n for n in names if not _has_mean(live[n]) or (n in buffers and not self.use_buffers)]
            self._pairs = [name for name in names if name not in set(plain)], plain
        averaged, plain = self._pairs
        lerp(list(map(copy.__getitem__, averaged)), list(map(live.__getitem__, averaged)), share)
        for name in plain:
            if copy[name].shape != live[name].shape:  # a buffer that the model has enlarged
                copy[name] = live[name].clone()
        if plain:
            foreach_copy_([copy[name] for name in plain], [live[name] for name in plain])


def lerp(averages: list[torch.Tensor], values: list[torch.Tensor], share: float) -> None:
    """Move averages towards values by a share of the way, each in its own type."""
    if not averages:
        return
    if any(map(ne, map(_DTYPE, averages), map(_DTYPE, values))):  # in C: models have hundreds of tensors
        values = [value.to(average.dtype) for average, value in zip(averages, values, strict=True)]
    foreach_lerp_(averages, values, share)


def _copied(live: ModelCopy) -> ModelCopy:
    made = {id(live[name]): live[name].detach().to(wide(live[name].dtype), copy=True) for name in distinct(live)}
    return {name: made[id(tensor)] for name, tensor in live.items()}


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
