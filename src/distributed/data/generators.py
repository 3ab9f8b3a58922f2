"""Generators: Python's, numpy's and torch's CPU generators under a seed, and afterwards as they were before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_MOST_NUMPY = 2**32  # seeds of numpy's legacy generator are smaller


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Under a seed, once."""
    with Generators(seed):
        yield


class Generators:
    """The generators of one reader: they continue from one `with` to the next, regardless of what is drawn in between.

    >>> reader, drawn = Generators(1), []
    >>> for _ in range(2):
    ...     with reader:
    ...         drawn.append(random.random())
    ...     random.seed(0)
    >>> with Generators(1):
    ...     drawn == [random.random(), random.random()]
    True
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._numpy = seed, np.random.MT19937()
        self._own: tuple[Any, torch.Tensor] | None = None  # None: nothing was drawn yet
        self._outer: tuple[Any, torch.Tensor] | None = None
        self._outer_numpy: Any = None

    def __enter__(self) -> None:
        self._outer = random.getstate(), torch.get_rng_state()
        self._outer_numpy = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._numpy)  # a pointer, where a state would be copied twice
        if self._own is not None:
            random.setstate(self._own[0])
            torch.set_rng_state(self._own[1])
            return
        random.seed(self._seed)
        np.random.seed(self._seed % _MOST_NUMPY)
        torch.default_generator.manual_seed(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = random.getstate(), torch.get_rng_state()
        assert self._outer is not None
        random.setstate(self._outer[0])
        torch.set_rng_state(self._outer[1])
        mtrand.set_bit_generator(self._outer_numpy)


class KeptGenerators:
    """The generators as they are now, to be put back later."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
