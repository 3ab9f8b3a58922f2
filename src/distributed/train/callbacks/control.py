"""Control: what callbacks see of a run and what they ask of it, on one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.strategies.base import ModelCopy, Strategy
from distributed.train.callbacks.callback import Callback, is_ours
from distributed.train.callbacks.statistics import StatisticsPass
from distributed.train.loaders import Loader
from distributed.train.progress import Progress


class Control:
    """Implements `TrainingControl`."""

    def __init__(
        self, plan: Plan, strategy: Strategy, session: Session, model: nn.Module, train: Loader | None = None
    ) -> None:
        """`train`: what the run is trained from."""
        self._strategy, self.session, self.model = strategy, session, model
        self._statistics = None if train is None else StatisticsPass(strategy, session, train)
        self.is_replicated = plan.is_replicated
        self.is_stream = train is not None and train.samples_per_epoch is None
        self.last_step: int | None = None  # of the epoch
        self._names: dict[int, str] = {}  # of the callbacks
        self._trainable: set[str] = set()  # the names of the parameters that were trained at first
        self._frozen: dict[int, frozenset[str]] = {}  # by each callback
        self.ever_frozen: set[str] = set()  # by those of the library, which freeze them again where a run resumes
        self.rank, self.world_size, self.run_dir = session.rank, session.world_size, plan.run_dir
        self.max_epochs = plan.epochs
        self.progress = Progress()
        self.is_resumed = self.is_interrupted = False
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.caller: Callback | None = None  # that was called last
        self.reason = self.reason_by = ""
        self.saves = False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._strategy.optimizer

    @property
    def epoch(self) -> int:
        return self.progress.epoch

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_last_step(self) -> bool:
        return self.progress.step == self.last_step

    def name(self, callbacks: Mapping[str, Callback]) -> None:
        """These are the callbacks, by the names under which checkpoints have what is theirs."""
        self._names = {id(callback): name for name, callback in callbacks.items()}
        self._strategy.keep_copies([name for name, callback in callbacks.items() if callback.keeps_copy])

    def weights(self, *, changes: bool = False) -> AbstractContextManager[ModelCopy]:
        return self._strategy.weights(changes=changes)

    def note_trainable(self) -> None:
        """What is trained before any callback is called."""
        self._trainable = {name for name, p in self.model.named_parameters() if p.requires_grad and not p.is_meta}

    def freeze(self, callback: Callback, names: Collection[str]) -> None:
        named = {name: p for name, p in self.model.named_parameters() if not p.is_meta}
        if is_ours(callback):
            self.ever_frozen.update(names)
        self._frozen[id(callback)] = frozenset(names)
        frozen = frozenset[str]().union(*self._frozen.values())
        for name in self._trainable:
            if name in named:
                named[name].requires_grad_(name not in frozen)

    @property
    def frozen(self) -> dict[str, list[str]]:
        """What each callback keeps from being trained, by its name."""
        return {self._names[one]: sorted(names) for one, names in self._frozen.items() if names}

    def take_frozen(self, found: Mapping[str, Collection[str]]) -> None:
        """As the run that is resumed had it."""
        self._frozen = {one: frozenset(found[name]) for one, name in self._names.items() if name in found}

    def copy_of(self, callback: Callback) -> ModelCopy | None:
        return self._strategy.copies[self._names[id(callback)]]

    def keep_copy(self, callback: Callback, copy: ModelCopy | None) -> None:
        self._strategy.copies[self._names[id(callback)]] = copy

    @property
    def copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of all copies, by the names of the model's."""
        return ((name, tensor) for copy in self._strategy.copies.values() for name, tensor in (copy or {}).items())

    def collect_statistics(self) -> None:
        assert self._statistics is not None
        has_begun = self.progress.steps_in_epoch > 0
        self._statistics.run(self.progress.epoch if has_begun else max(0, self.progress.epoch - 1), self.model)

    def log(self, name: str, value: float) -> None:
        self.logged[name] = float(value)

    def stop(self, reason: str) -> None:
        if not self.reason:
            self.reason = str(reason) or "no reason given"
            self.reason_by = "" if self.caller is None else type(self.caller).__name__

    def save(self) -> None:
        self.saves = True
