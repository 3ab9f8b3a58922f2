"""A sample's own random stream: what augmentation draws depends on (seed, epoch, index), not on workers or on history.

Without it, a run that is resumed in the middle of an epoch starts its data loader workers anew, and with them their
augmentation.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from distributed.data.order import derive_seed

EpochIndex = tuple[int, int]


class SeededSamples(Dataset[Any]):
    """A map dataset whose indices are (epoch, index). For data loader workers, whose generators are theirs alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: EpochIndex) -> Any:
        epoch, index = key
        seed = derive_seed(self._seed, "sample", epoch, index)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        return self._dataset[index]
