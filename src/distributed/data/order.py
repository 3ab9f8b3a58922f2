"""The order of samples in an epoch: a function of seed and epoch, the same for any number of ranks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from several numbers, so that neighbouring runs, epochs and ranks share no stream.

    >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 1) != derive_seed(0, "epoch", 2)
    True
    """
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shuffled_order(length: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(length)."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order


def drawn_order(sampler: Iterable[int], seed: int, epoch: int) -> list[int]:
    """What a user's own sampler draws: once, under a seed of this epoch, so that every rank draws the same."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.manual_seed(derive_seed(seed, "sampler", epoch))  # type: ignore[attr-defined]
    with seeded(derive_seed(seed, "sampler", epoch)):
        return [int(index) for index in sampler]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's CPU generators under a seed, and afterwards as they were before."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
