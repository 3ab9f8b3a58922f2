"""What a contender is given to train, the same for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader


class BenchJob(Protocol):
    """A training: its model, rows and optimizer, on this rank. A contender returns the trained module."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def scratch(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def precision(self) -> str: ...
    @property
    def log_every(self) -> int: ...

    def loader(self) -> DataLoader[Any]:
        """What a user has before anything is distributed."""

    def own_loader(self) -> DataLoader[Any]:
        """This rank's part of it."""

    def make_model(self) -> nn.Module: ...
    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...
    def loss(self, model: nn.Module, row: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def autocast(self) -> AbstractContextManager[Any]:
        """What a hand-written loop computes a loss under."""

    def look(self, step: int) -> None:
        """Called by a loop that has fetched the batch of this step, and not yet trained with it."""
