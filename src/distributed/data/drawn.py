"""The order that a user's own sampler draws, under a seed of the epoch, so that every rank draws the same."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from distributed.data.order import derive_seed


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
