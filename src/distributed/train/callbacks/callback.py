"""Callback: the interface of code that runs at points of a training, on every rank, and what it can see and steer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.core.registry import nearest_hint
from distributed.strategies.base import ModelCopy, StepTask


class TrainingControl(Protocol):
    """What a callback sees of a training, and what it may ask for. Every rank has its own."""

    model: nn.Module  # of this rank: with shards of its parameters, where it is sharded
    optimizer: torch.optim.Optimizer
    rank: int
    world_size: int
    run_dir: str
    max_epochs: int

    @property
    def epoch(self) -> int: ...

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""

    @property
    def is_resumed(self) -> bool:
        """Whether this training was resumed from a checkpoint, or from the memory of another rank."""

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ends this training before its end."""

    @property
    def is_last_step(self) -> bool:
        """Whether the step that came last ends its epoch; of a stream, that is not known."""

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has all of the model and of the optimizer's state."""

    @property
    def is_stream(self) -> bool:
        """Whether the training data is a stream, whose length is not known."""

    @property
    def loss(self) -> float | None:
        """The mean over all ranks and the steps that were read last: each `log_every_n_steps`; None: none yet."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest means over all ranks, as the history has them: `loss`, `val_loss` …"""

    def weights(self, *, changes: bool = False) -> AbstractContextManager[ModelCopy]:
        """This rank's part of the model's tensors by name, to read, or to change in place between two steps.

        Every rank must enter it. Parameters are those that the optimizer steps; sharded ones are local tensors.
        """

    def freeze(self, callback: Callback, names: Collection[str]) -> None:
        """Keep these parameters from being trained until this callback calls it without them.

        Alike on all ranks, where they meet: at the beginning, before an epoch, or after a step of `meets_after`.
        """

    def copy_of(self, callback: Callback) -> ModelCopy | None:
        """The copy of the model's tensors that this callback keeps, which checkpoints have; None: not yet."""

    def keep_copy(self, callback: Callback, copy: ModelCopy | None) -> None:
        """Begin the copy of this callback, which says `keeps_copy`; every rank calls it after the same step."""

    def collect_statistics(self) -> None:
        """Forward passes over the training data by which BatchNorm collects statistics; every rank must call it."""

    def log(self, name: str, value: float) -> None:
        """In `on_epoch_end`, add a number to the metrics of the epoch: the mean over the ranks that log it."""

    def stop(self, reason: str) -> None:
        """Ask for the end of the run; all ranks end after the same step. One rank's asking is enough."""

    def save(self) -> None:
        """Ask for a checkpoint; one rank's asking is enough."""


class Callback:
    """Override what you need; each method runs on every rank, at the same place of the training.

    What is asked for by `run.stop` and `run.save` is agreed on by all ranks after the steps whose numbers are read
    (`log_every_n_steps`), after those of `meets_after`, after each validation, and where an epoch begins and ends.

    >>> class Patience(Callback):
    ...     def on_epoch_end(self, run, metrics):
    ...         if metrics["loss"] > 10:
    ...             run.stop("the loss has grown")
    """

    keeps_copy = False  # whether it has a copy of the model's tensors, which is saved and sharded as the model is

    def on_fit_start(self, run: TrainingControl) -> None:
        """The model is ready, and what it resumes from is loaded."""

    def on_epoch_start(self, run: TrainingControl) -> None:
        """Before the first step of an epoch; not again where a run resumes within it."""

    def on_step_end(self, run: TrainingControl) -> None:
        """After each optimizer step. It should not wait for the device."""

    def on_validation_start(self, run: TrainingControl) -> None: ...

    def on_validation_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None:
        """After a validation; where a signal cut it short only with `on_validation_start`, and without metrics."""

    def on_epoch_end(self, run: TrainingControl, metrics: Mapping[str, float]) -> None:
        """After the evaluation of a whole epoch, before its checkpoint."""

    def on_save(self, run: TrainingControl) -> None:
        """Before the state of a checkpoint is taken."""

    def on_load(self, run: TrainingControl) -> None:
        """After the state of a checkpoint, or of another rank, was taken over; `load_state` was called before."""

    def on_fit_end(self, run: TrainingControl) -> None:
        """After the last step, before the last checkpoint."""

    def on_exception(self, run: TrainingControl, error: BaseException) -> None:
        """The training has failed on this rank, or its world broke. No collective may follow."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, the same on every rank: numbers, texts and tensors."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...

    def meets_after(self, step: int) -> bool:
        """Whether the ranks are to agree on requests after this step, too; the answer must be the same on all."""
        return False

    def check(self, plan: Plan, task: StepTask, evaluates: bool) -> list[Problem]:
        """What speaks against this callback in a run, before anything starts; `evaluates`: it has validation data."""
        return []


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def is_ours(callback: Callback) -> bool:
    """Whether it is one of the library's."""
    return type(callback).__module__.startswith("distributed.")


def overrides(callback: Callback, name: str) -> bool:
    """Whether a callback has a method of its own, in its class or as an attribute.

    >>> overrides(Callback(), "on_save")
    False
    """
    own = vars(callback).get(name, getattr(type(callback), name, None))
    return own is not getattr(Callback, name)


def keyed(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Callbacks by the names under which a checkpoint has their state; those of one class are numbered.

    >>> class Count(Callback): ...
    >>> list(keyed([Count(), Callback(), Count()]))
    ['Count', 'Callback', 'Count-2']
    """
    found: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = 1 + sum(type(other).__name__ == kind for other in found.values())
        found[kind if number == 1 else f"{kind}-{number}"] = callback
    return found


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Kinds, and names that look like a hook and are none, before anything starts."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        kind = type(callbacks).__name__
        raise TaskError(
            f"callbacks is a {kind}",
            why="a run takes a list of callbacks, and calls them in its order",
            do=f"callbacks=[{kind}(…)]",
        )
    for place, callback in enumerate(callbacks):
        _check_kind(callback)
        if any(callback is other for other in callbacks[:place]):
            name = type(callback).__name__
            raise TaskError(
                f"the same {name} is passed twice",
                why="each of its methods would be called twice, and its state saved under two names",
                do=f"pass it once, or make another {name}(…)",
            )
    evaluated = [name for name, one in keyed(callbacks).items() if one.keeps_copy and getattr(one, "evaluates", False)]
    if len(evaluated) > 1:
        raise TaskError(
            f"{' and '.join(evaluated)} are averages that the model is evaluated with",
            why="a validation has one set of weights, and val_loss is that of one of them",
            do=f"{evaluated[-1].partition('-')[0]}(…, evaluates=False), for all but one",
        )
    return tuple(callbacks)


def _check_kind(callback: Any) -> None:
    kind = callback if isinstance(callback, type) else type(callback)
    if not isinstance(callback, Callback):
        is_class = isinstance(callback, type) and issubclass(callback, Callback)
        raise TaskError(
            f"{kind.__name__} is {'a class, not a' if is_class else 'no'} callback",
            why="the trainer calls the methods of a distributed.Callback",
            do=f"callbacks=[{kind.__name__}()]" if is_class else f"class {kind.__name__}(distributed.Callback): …",
        )
    named = [name for name in dir(callback) if name.startswith("on_") and name not in HOOKS]
    unknown = [name for name in named if callable(getattr(callback, name))]
    if unknown:
        raise TaskError(
            f"{kind.__name__}.{unknown[0]} would never be called",
            why=f"the trainer calls {', '.join(HOOKS)}",
            do=nearest_hint(unknown[0], HOOKS) or f"rename {unknown[0]}",
        )
