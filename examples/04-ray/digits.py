"""What these examples share: the handwritten digits that come with scikit-learn, and a small model of them."""

from __future__ import annotations

import numpy as np
import torch
from sklearn import datasets
from torch import nn
from torch.utils.data import TensorDataset


def load_arrays() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 8 × 8, as rows of 64 numbers around 0, and their labels."""
    bunch = datasets.load_digits()
    return (bunch.data.astype("float32") - 8) / 8, bunch.target.astype("int64")


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; every fifth image is for the test."""
    images, labels = map(torch.from_numpy, load_arrays())
    is_test = torch.arange(len(labels)) % 5 == 4
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def make_model(hidden_size: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 10))
