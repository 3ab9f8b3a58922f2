"""The order of samples in an epoch: a function of seed and epoch, the same for any number of ranks and any engine."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from several numbers, so that neighbouring runs, epochs and ranks share no stream.

    >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 1) != derive_seed(0, "epoch", 2)
    True
    """
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shuffled_order(length: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(length), by the generator whose numbers numpy has promised never to change.

    >>> sorted(shuffled_order(5, seed=0, epoch=1))
    [0, 1, 2, 3, 4]
    """
    order: list[int] = permutation(length, seed, epoch).tolist()
    return order


def permutation(length: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The same order as an array."""
    high, low = divmod(derive_seed(seed, "order", epoch), 2**32)
    return np.random.RandomState([low, high]).permutation(length)
