"""StatisticsPass: BatchNorm's statistics over the training data, with all ranks, for weights that no step has seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from distributed.checkpoint.restore.rng import restore_rng, rng_state
from distributed.core.errors import TaskError
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import BatchNormBase
from distributed.strategies.base import Strategy
from distributed.train.loaders import Loader


def has_statistics(model: nn.Module) -> bool:
    """Whether there are layers with statistics to collect."""
    return any(_has_own(module) for module in model.modules())


class StatisticsPass:
    """Of one rank: the mean over the micro-batches of an epoch, as `torch.optim.swa_utils.update_bn` computes it."""

    def __init__(self, strategy: Strategy, session: Session, train: Loader) -> None:
        self._strategy, self._session, self._train = strategy, session, train

    def run(self, epoch: int, model: nn.Module) -> None:
        """One pass over the data in the order of the epoch; every rank must call it. Random numbers are left alone."""
        if self._train.samples_per_epoch is None:
            raise TaskError(
                "BatchNorm's statistics cannot be collected over a stream",
                why="it would be read once more, and a run that resumes would find it elsewhere",
                do="use GroupNorm or LayerNorm, or a dataset with a length",
            )
        before = rng_state(self._session.device)
        try:
            with _collecting(model):
                for microbatches, _ in self._train.epoch(epoch):
                    self._strategy.collect_statistics(microbatches)
        finally:
            restore_rng(before, self._session.device)


@contextmanager
def _collecting(model: nn.Module) -> Iterator[None]:
    """Reset the statistics, and make plain means of them."""
    layers: list[Any] = [module for module in model.modules() if _has_own(module)]
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None
        model.train()
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, mode in modes:
            module.training = mode


def _has_own(module: nn.Module) -> bool:
    return isinstance(module, BatchNormBase) and module.track_running_stats
