"""Ranks that build their datasets by themselves see whether they have built the same, without reading a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from distributed.data.checks.fingerprint import fingerprint
from distributed.data.source import Source


class Files(Dataset):
    def __init__(self, names: list[str], labels: Any = None) -> None:
        self.names, self.labels = names, labels

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is read")


def tensors(seed: int = 0) -> TensorDataset:
    return TensorDataset(torch.randn(500, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(500))


def split(seed: int) -> Subset:
    return random_split(tensors(), [400, 100], generator=torch.Generator().manual_seed(seed))[0]


NAMES = [f"/data/{n}.png" for n in range(30)]


@pytest.mark.parametrize(
    ("one", "other", "part"),
    [
        (tensors(), tensors(1), "dataset.tensors[0]"),
        (tensors(), Subset(tensors(), range(500)), "the class of dataset"),
        (split(0), split(1), "dataset.indices"),
        (ConcatDataset([tensors(), split(0)]), ConcatDataset([tensors(), split(1)]), "dataset.datasets[1].indices"),
        (Files(NAMES * 5, np.arange(150)), Files(NAMES * 5, np.arange(150) % 149), "dataset.labels"),
        (Files(NAMES), Files(NAMES[:-1]), "the length of dataset"),
        (Files(NAMES), Files(NAMES[::-1]), "dataset.names"),
        (Files(NAMES, np.arange(30)), Files(NAMES, np.arange(30) % 7), "dataset.labels"),
        (Files(NAMES, [1.0] * 30), Files(NAMES, [1.0] * 29 + [2.0]), "dataset.labels"),
    ],
)
def test_fingerprint_of_other_data_differs(one: Any, other: Any, part: str) -> None:
    mine, theirs = fingerprint(Source(one)), fingerprint(Source(other))
    assert next(name for name in mine if mine[name] != theirs.get(name)) == part


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tensors(), tensors()),
        (split(3), split(3)),
        (Files(NAMES), Files([name.replace("/data", "/scratch/node7") for name in NAMES])),
        (Files(NAMES, [None] * 30), Files(NAMES, [object()] * 30)),
    ],
    ids=["tensors", "subset", "files in another folder", "what is no number"],
)
def test_fingerprint_of_equal_data_is_equal(one: Any, other: Any) -> None:
    assert fingerprint(Source(one)) == fingerprint(Source(other))


def test_fingerprint_includes_loader_settings() -> None:
    whole = fingerprint(Source(tensors()))
    for source in (Source(tensors(), shuffle=True), Source(tensors(), batch_size=4), Source(tensors(), sampler=[1])):
        assert fingerprint(source) != whole
