"""Virtual ranks: each takes a share of every step, with random streams of its own.

What is drawn for a share is a function of seed, epoch, step and virtual rank, so neither the number of processes nor
that of data loader workers nor a resume changes an augmentation or a dropout mask.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from distributed.data.generators import seeded
from distributed.data.order import derive_seed


class VirtualShare(NamedTuple):
    """The share that one virtual rank takes of one step."""

    step_seed: int  # the same for all shares of the step
    number: int  # 0 ≤ number < virtual ranks

    @staticmethod
    def of(seed: int, epoch: int, step: int, number: int) -> VirtualShare:
        return VirtualShare(derive_seed(seed, "leaves", epoch, step), number)

    @property
    def loading_seed(self) -> int:
        return derive_seed(self.step_seed, "load", self.number)

    @property
    def training_seed(self) -> int:
        return derive_seed(self.step_seed, "train", self.number)

    @property
    def after_seed(self) -> int:
        """For what is drawn between this step and the next, the same on every rank."""
        return derive_seed(self.step_seed, "after")


class ShareIndices(NamedTuple):
    """Which samples a share holds, as the sampler hands it to a data loader's worker."""

    loading_seed: int
    indices: list[int]


class ShareReader(Dataset[Any]):
    """Reads whole shares of a dataset, each under its own seed. For anything else it passes for the dataset.

    A worker_init_fn finds it as `get_worker_info().dataset` and may use and set the dataset's attributes through it.
    With `restores_generators` it reads in the process that trains, and leaves the generators there as they were.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], *, restores_generators: bool = False) -> None:
        self.__dict__.update(_dataset=dataset, _collate=collate, _restores_generators=restores_generators)

    def __getitem__(self, share: ShareIndices) -> Any:
        if self.__dict__["_restores_generators"]:
            with seeded(share.loading_seed):
                return self._read_share(share)
        seed_generators(share.loading_seed)
        return self._read_share(share)

    def _read_share(self, share: ShareIndices) -> Any:
        dataset = self.__dict__["_dataset"]
        read_all = getattr(dataset, "__getitems__", None)
        samples = read_all(share.indices) if callable(read_all) else [dataset[index] for index in share.indices]
        return self.__dict__["_collate"](samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_dataset"], name, value)


def as_read(share: Any) -> Any:
    """The collate function of a loader whose dataset has collated already."""
    return share


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Python's, numpy's and torch's generators, with that of a GPU if one is given."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
