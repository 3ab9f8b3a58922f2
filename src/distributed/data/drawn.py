"""What a user's own sampler draws: one rank draws for all, once an epoch, and what it drew is part of the run's state.

A sampler may draw from a generator that cannot be seeded from outside (numpy's default_rng, for example). So the ranks
do not each draw the order of an epoch: rank 0 does, and sends it. A run that resumes in the middle of an epoch takes
the order from its checkpoint or from another rank's memory. For the epochs that follow, a new sampler is drawn from as
often as the one before it; a digest shows whether it drew the same, and a warning reports it if not.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from distributed.core.errors import DataError
from distributed.data.generators import seeded
from distributed.data.order import derive_seed

Tree = dict[str, Any]
Share = Callable[[Callable[[], Tree]], Tree]  # what rank 0 makes, on every rank

# Drawn under a seed of the epoch, these need no draws before it; unless they have a generator of the user's.
_TORCHS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_SEQUENCES = (list, tuple, range, np.ndarray, torch.Tensor)


def make_here(make: Callable[[], Tree]) -> Tree:
    """The Share of a process that is alone."""
    return make()


class SeededOrder:
    """The order that torch's DistributedSampler(seed=…) splits over its ranks."""

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed, self._epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return iter(torch.randperm(self._length, generator=generator).tolist())

    def __len__(self) -> int:
        return self._length


class OwnSampler:
    """A user's sampler, and how often it was drawn from in this process."""

    def __init__(
        self, sampler: Iterable[int], worker_seeds: torch.Generator | None = None, *, seeds_once: bool = False
    ) -> None:
        """`worker_seeds`: of the DataLoader, which draws its workers' seed from it first, each epoch or only once."""
        self.sampler, self._worker_seeds, self._seeds_once = sampler, worker_seeds, seeds_once
        self.drawn = 0  # epochs
        self.digest = self.digest_before = ""  # of all of them, and of all but the last
        self._last: tuple[int, int, torch.Tensor] | None = None  # an epoch, the seed, and the order
        self._is_loaded = False

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        return type(self.sampler).__name__

    @property
    def is_pure(self) -> bool:
        """Whether an epoch's order depends on the seed and the epoch alone."""
        if type(self.sampler) in _TORCHS:
            return getattr(self.sampler, "generator", None) is None
        return type(self.sampler) in (*_SEQUENCES, SeededOrder)

    def draw(self, epoch: int, seed: int) -> torch.Tensor:
        """The order of an epoch, after those of the epochs before it. Of the epoch that was drawn last, it is known."""
        if self._last is None or self._last[:2] != (epoch, seed):
            while not self.is_pure and self.drawn < epoch:
                self._draw_next(self.drawn, seed)
            self._last = epoch, seed, self._draw_next(epoch, seed)
        return self._last[2]

    def state(self) -> Tree | None:
        """The state of a sampler with `state_dict`."""
        return self.sampler.state_dict() if self._has_state else None  # type: ignore[attr-defined]

    def load_state(self, state: Tree, drawn: int, digest: str | None) -> None:
        """The state of a sampler that had drawn that many epochs."""
        if self._has_state:
            self.sampler.load_state_dict(state)  # type: ignore[attr-defined]
            self.drawn, self.digest, self._last, self._is_loaded = drawn, digest or "", None, True

    @property
    def _has_state(self) -> bool:
        return all(callable(getattr(self.sampler, name, None)) for name in ("state_dict", "load_state_dict"))

    def _draw_next(self, epoch: int, seed: int) -> torch.Tensor:
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if self._worker_seeds is not None and not (self._seeds_once and self.drawn):
            torch.empty((), dtype=torch.int64).random_(generator=self._worker_seeds)
        order = self._read(epoch, seed)
        if self._is_loaded and not len(order):  # a state may be that of an iteration that has ended, as of torchdata's
            order = self._read(epoch, seed)
        self._is_loaded = False
        self.drawn += 1
        self.digest_before, self.digest = self.digest, chain(self.digest, order)
        return order

    def _read(self, epoch: int, seed: int) -> torch.Tensor:
        with seeded(derive_seed(seed, "sampler", epoch)):
            try:
                return narrow([operator.index(index) for index in self.sampler])
            except TypeError as failed:
                raise DataError(
                    f"the sampler {self.name} draws something that is no index of a sample",
                    why=str(failed),
                    do="let it draw integers from range(len(dataset)), one for each sample",
                ) from failed


class DrawnOrders:
    """The orders of a run's epochs, alike on every rank; the last one is kept."""

    def __init__(self, sampler: OwnSampler, seed: int, share: Share = make_here) -> None:
        self._sampler, self._seed, self._share = sampler, seed, share
        self._epoch = -1
        self._order: torch.Tensor | None = None
        self._state: Tree | None = None  # of the sampler, after it has drawn that order
        self._digest: str | None = ""  # of the epochs that were drawn in this run; None: not known
        self.note = ""  # a warning for the run's events

    def order(self, epoch: int) -> torch.Tensor:
        """Every rank calls it for the same epochs. 64-bit numbers."""
        if self._epoch != epoch or self._order is None:
            made = self._share(lambda: self._make(epoch))
            order: torch.Tensor = made["order"].cpu()
            if self._digest is not None:
                self._digest = chain(self._digest, order)
            self._epoch, self._order, self._state = epoch, order, made["sampler"]
        return self._order.long()

    def state(self, epoch: int) -> Tree:
        """For a run that stands in this epoch: its order, if it was drawn, and what later ones need."""
        if self._epoch < 0:
            return {}
        known = {"drawn": self._epoch + 1, "digest": self._digest, "sampler": self._state}
        is_its = epoch == self._epoch and self._order is not None
        return known | ({"order": self._order} if is_its else {})

    def load_state(self, state: Tree) -> None:
        """None of it, of a checkpoint that does not know it."""
        if not state:
            self._digest = None
            return
        self._epoch, self._digest, self._state = state["drawn"] - 1, state["digest"], state["sampler"]
        order = state.get("order")
        self._order = None if order is None else order.cpu()
        if self._state is not None:
            self._sampler.load_state(self._state, state["drawn"], state["digest"])

    def _make(self, epoch: int) -> Tree:
        """Where the order is drawn: on rank 0."""
        sampler = self._sampler
        order = sampler.draw(epoch, self._seed)
        if self._digest is not None and not sampler.is_pure and sampler.digest_before != self._digest:
            self.note = (
                f"the sampler {sampler.name} does not draw again what it drew before: its generator cannot be "
                f"restored. No sample is repeated or left out, but the orders from epoch {epoch + 1} on are not those "
                "of the run that was not interrupted. Give it state_dict() and load_state_dict(), or seed it"
            )
        return {"order": order, "sampler": sampler.state()}


def chain(digest: str, order: torch.Tensor) -> str:
    """A digest of one more order after those before."""
    numbers = order.to(torch.int64).contiguous()
    mixed = hashlib.blake2b(digest.encode(), digest_size=16)
    mixed.update(numbers.numpy().data)
    return mixed.hexdigest()


def narrow(numbers: list[int]) -> torch.Tensor:
    """In half the bytes, where they fit."""
    order = np.asarray(numbers, dtype=np.int64)
    limits = np.iinfo(np.int32)
    fits = not len(order) or (order.min() >= limits.min and order.max() <= limits.max)
    return torch.from_numpy(order.astype(np.int32) if fits else order)
