"""Whether every sample was used once: digests of an epoch's order and of what a rank took of it.

All ranks must have the same order, and what they took together must be what the steps had: as many positions, and the
same sum of a mixture of each, which no position that is repeated or left out gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from distributed.data.shares import EpochSplit, share

_LOOKS = 4096  # positions of an order, evenly spaced, of which its digest is made
_SUM_BITS = 47  # of a rank's sum: those of 65,536 ranks fit into 63
_CHUNK = 1 << 20  # positions that are mixed at once


class Tally(NamedTuple):
    """Positions of an epoch, as their number and the sum of their mixtures; and those that they should be a part of.

    What should be taken is cut into one part a rank, so that all ranks together have mixed every position twice.
    """

    taken: int
    taken_sum: int
    due: int
    due_sum: int


def order_digest(order: list[int] | range | torch.Tensor) -> str:
    """
    >>> order_digest(range(3)) == order_digest([0, 1, 2]) == order_digest(torch.arange(3)) != order_digest([0, 2, 1])
    True
    """
    step = max(1, len(order) // _LOOKS)
    some = torch.as_tensor(order[::step] if not isinstance(order, range) else list(order[::step]), dtype=torch.int64)
    mixed = hashlib.blake2b(str(len(order)).encode(), digest_size=8)
    mixed.update(some.contiguous().numpy().tobytes())
    return mixed.hexdigest()


def tally(cut: EpochSplit, first_step: int, stop_step: int) -> Tally:
    """Of one rank, over some steps of an epoch."""
    taken = taken_sum = due = due_sum = 0
    for positions in _taken(cut, first_step, stop_step):
        taken, taken_sum = taken + len(positions), taken_sum + _mixed_sum(positions)
    size = cut.batch.global_batch
    first, last = first_step * size, min(stop_step * size, cut.samples)
    start, stop = share(max(0, last - first), cut.batch.ranks, cut.rank)
    for begin in range(first + start, first + stop, _CHUNK):
        positions = np.arange(begin, min(begin + _CHUNK, first + stop), dtype=np.uint64)
        due, due_sum = due + len(positions), due_sum + _mixed_sum(positions)
    return Tally(taken, taken_sum % 2**_SUM_BITS, due, due_sum % 2**_SUM_BITS)


def agree(total: Tally) -> bool:
    """Whether the sum of all ranks' tallies has every position once."""
    return total.taken == total.due and (total.taken_sum - total.due_sum) % 2**_SUM_BITS == 0


def _taken(cut: EpochSplit, first_step: int, stop_step: int) -> Iterator[np.ndarray]:
    """The positions that a rank takes, in some pieces. Full steps are cut alike."""
    size, full = cut.batch.global_batch, min(cut.full_steps, stop_step)
    shape = [np.arange(c.start, c.stop, dtype=np.uint64) for c in cut.cuts(0)] if cut.full_steps else []
    offsets = np.concatenate(shape) if shape else np.empty(0, dtype=np.uint64)
    at_once = max(1, _CHUNK // max(1, len(offsets)))
    for step in range(first_step, full, at_once):
        bases = np.arange(step, min(step + at_once, full), dtype=np.uint64) * np.uint64(size)
        yield (bases[:, None] + offsets).reshape(-1)
    for step in range(max(first_step, full), stop_step):
        for c in cut.cuts(step):
            yield np.arange(c.start, c.stop, dtype=np.uint64)


def _mixed_sum(positions: np.ndarray) -> int:
    """By splitmix64, so that no few positions add up to others."""
    with np.errstate(over="ignore"):
        mixed = (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        return int(np.sum(mixed, dtype=np.uint64)) % 2**_SUM_BITS
