"""What a loop of the user's own gives to `prepare`, and the task that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed.core.config import DistributedConfig
from distributed.core.errors import TaskError
from distributed.data.source import Source, read_source
from distributed.strategies.checks.elementwise import needs_closure
from distributed.train.given.modules import as_module
from distributed.train.task import Task


class GivenToPrepare(NamedTuple):
    """The objects that are prepared, by their kinds, each in its order."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    loaders: list[Any]

    @property
    def optimizers_by_name(self) -> dict[str, torch.optim.Optimizer]:
        """By their places; {}: there is one at most, which needs no name."""
        several = self.optimizers if len(self.optimizers) > 1 else []
        return {f"optimizer_{at}": found for at, found in enumerate(several)}

    def task(self) -> Task:
        """Several models are one module, under their places; several optimizers step when the loop says so."""
        several = {f"model_{at}": found for at, found in enumerate(self.models)}
        model = self.models[0] if len(several) == 1 else as_module(several)
        if named := self.optimizers_by_name:
            return SeveralOptimizers(model, named)
        kind = Task if len(several) == 1 else LoopTask
        return kind(model, optimizer=self.optimizers[0] if self.optimizers else None)

    def sources(self, config: DistributedConfig) -> list[Source]:
        """The data of the loaders, as the settings want it; the first is trained on."""
        found = [read_source(loader, f"loader {at}") for at, loader in enumerate(self.loaders)]
        if config.bucket_by_length:
            found[0] = found[0].bucketed(config.bucket_by_length, "loader 0")
        if config.overfit_batches is not None:
            trained = found[0].in_order()
            found = [trained, *[replace(trained, drop_last=False)] * (len(found) - 1)]
        return found


class LoopTask(Task):
    """Of a loop with several models, each of which it calls."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        raise AssertionError("the loop takes the steps")

    def own_code(self) -> dict[str, Any]:
        return {}


class SeveralOptimizers(LoopTask):
    """Of a loop with several: it makes the gradients, and says which of them steps."""

    manual_optimization = True
    manual_as = "several optimizers under distributed.start"

    def __init__(self, model: Any, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__(model)
        self._optimizers = dict(optimizers)

    def configure_optimizers(self, model: nn.Module) -> Any:
        return dict(self._optimizers)


def is_loader(found: Any) -> bool:
    return isinstance(found, DataLoader | Dataset)


def sorted_by_kind(objects: Sequence[Any]) -> GivenToPrepare:
    """The models, optimizers and loaders among what was given to `prepare`."""
    models = [found for found in objects if isinstance(found, nn.Module)]
    optimizers = [found for found in objects if isinstance(found, torch.optim.Optimizer)]
    loaders = [found for found in objects if is_loader(found)]
    known = {id(found) for found in (*models, *optimizers, *loaders)}
    unknown = [found for found in objects if id(found) not in known]
    if unknown:
        raise TaskError(
            f"prepare got a {type(unknown[0]).__name__}",
            why="it prepares models, their optimizers and DataLoaders",
            do="run.track(name=…) saves other objects in checkpoints",
        )
    if not models or not loaders:
        missing = "model" if not models else "DataLoader to train on"
        raise TaskError(
            f"prepare got no {missing}",
            why="a run is planned for its model and its data",
            do="run.prepare(model, optimizer, train_loader)",
        )
    for found in optimizers:
        if needs_closure(found):
            raise TaskError(
                f"prepare got {type(found).__name__}, whose step calls a closure",
                why="in a loop of your own the passes of a step come before its step",
                do="Trainer(…, optimizer=…) trains with it, also with a training_step of yours",
            )
    return GivenToPrepare(models, optimizers, loaders)


def name_among(optimizers: Mapping[int, str], wanted: torch.optim.Optimizer | None) -> str:
    """Which of several a step is of. `optimizers`: their names, by their ids."""
    name = optimizers.get(id(wanted))
    if name is None:
        got = "no optimizer" if wanted is None else f"a {type(wanted).__name__} that was not prepared"
        raise TaskError(
            f"run.step got {got}",
            why=f"this run has {len(optimizers)} optimizers, and each steps by itself",
            do="run.step(optimizer), with one that run.prepare was given",
        )
    return name
