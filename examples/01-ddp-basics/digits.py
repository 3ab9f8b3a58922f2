"""Handwritten digits for the examples: MNIST's own files where there are some, else those inside scikit-learn."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

_PARTS = {"train": ("train-images", "train-labels"), "test": ("t10k-images", "t10k-labels")}


def load_digits(data_dir: str | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images (N, 1, H, W) with a mean of 0 and a deviation of 1, and labels (N,).

    `data_dir` is a folder with MNIST's four files, packed (.gz) or not; 60,000 and 10,000 images of 28 × 28. Without
    it: the 1,797 images of 8 × 8 that come with scikit-learn, every fifth of them for the test.
    """
    if data_dir is None:
        train, test = _digits_of_sklearn()
    else:
        train, test = _read_mnist(Path(data_dir), "train"), _read_mnist(Path(data_dir), "test")
    mean, deviation = train[0].mean(), train[0].std()
    return _as_dataset(*train, mean, deviation), _as_dataset(*test, mean, deviation)


def _as_dataset(
    images: torch.Tensor, labels: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor
) -> TensorDataset:
    return TensorDataset(((images - mean) / deviation).unsqueeze(1), labels)


def _digits_of_sklearn() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    from sklearn import datasets  # of the extra "examples"; not needed where MNIST is at hand

    bunch = datasets.load_digits()
    images = torch.from_numpy(bunch.images).float()
    labels = torch.from_numpy(bunch.target).long()
    is_test = torch.arange(len(labels)) % 5 == 4
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def _read_mnist(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (_read_idx(_find(folder, stem)) for stem in _PARTS[part])
    if len(images) != len(labels):
        raise SystemExit(f"{folder}: {len(images)} images but {len(labels)} labels in the {part} files")
    return torch.from_numpy(images).float(), torch.from_numpy(labels).long()


def _find(folder: Path, stem: str) -> Path:
    """`train-images-idx3-ubyte.gz`, or the same with a dot, or unpacked: whichever way it was downloaded."""
    found = sorted(
        path for path in folder.glob(f"{stem}*ubyte*") if path.suffix in (".gz", "", ".idx3-ubyte", ".idx1-ubyte")
    )
    if not found:
        raise SystemExit(f"{folder} has no {stem}-idx*-ubyte(.gz); leave --data-dir out to use scikit-learn's digits")
    return found[0]


def _read_idx(path: Path) -> np.ndarray:
    """An array in MNIST's format: two zero bytes, the type (8: bytes), the number of dimensions, their sizes, data."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{path} is not an idx file of bytes")
    start = 4 + 4 * raw[3]
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist()
    if len(raw) != start + math.prod(shape):
        raise SystemExit(f"{path} is damaged: {len(raw)} bytes, but its header says {start + math.prod(shape)}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()
