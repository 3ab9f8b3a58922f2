"""Choice: which way of reducing a tensor of some size is the fastest here, measured by all ranks at its first use.

What wins depends on the link, the number of ranks and what else runs, so it is not written down beforehand. Each size
class (a factor of four) is measured once a group; the slowest rank counts, and all ranks see the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from distributed.comm.groups.places import Place

_ROUNDS, _REHEARSALS = 5, 1
_LEAST_GAIN = 0.9  # of the backend's own time: what wins by less may win by noise
BACKEND = "backend"

Reduce = Callable[[str, torch.Tensor], object]


@dataclass(frozen=True)
class AlgorithmChoice:
    """What `algorithm="auto"` takes for tensors of up to `bytes`."""

    bytes: int
    device: str
    algorithm: str
    seconds: Mapping[str, float]

    @property
    def reason(self) -> str:
        """
        >>> AlgorithmChoice(4096, "cpu", "backend", {"backend": 0.0002, "ring": 0.0003}).reason
        'up to 4,096 bytes on cpu: backend (backend 200 µs, ring 300 µs)'
        """
        times = ", ".join(f"{name} {seconds * 1e6:,.0f} µs" for name, seconds in self.seconds.items())
        return f"up to {self.bytes:,} bytes on {self.device}: {self.algorithm} ({times})"


def size_class(count: int) -> int:
    """
    >>> size_class(1), size_class(5), size_class(64)
    (1, 16, 64)
    """
    return int(4 ** ((max(1, count) - 1).bit_length() + 1 >> 1))


def choose(
    place: Place,
    size: int,
    device: torch.device,
    *,
    names: Sequence[str],
    reduce: Reduce,
    take_largest: Callable[[torch.Tensor], object],
) -> AlgorithmChoice:
    """The choice for this size class. `reduce` reduces a tensor by an algorithm; `take_largest` over the ranks."""
    key = ("choice", size_class(size), device.type)
    if key not in place.kept:
        place.kept[key] = _measure(size_class(size), device, names, reduce, take_largest)
    found: AlgorithmChoice = place.kept[key]
    return found


def choices_in(place: Place) -> list[AlgorithmChoice]:
    """Those that were made so far."""
    return sorted((c for c in place.kept.values() if isinstance(c, AlgorithmChoice)), key=lambda c: (c.device, c.bytes))


def pick(seconds: Mapping[str, float]) -> str:
    """
    >>> pick({"backend": 1.0, "ring": 0.95, "tree": 2.0}), pick({"backend": 1.0, "ring": 0.8, "tree": 2.0})
    ('backend', 'ring')
    """
    fastest = min(seconds, key=lambda name: seconds[name])
    return fastest if seconds[fastest] < _LEAST_GAIN * seconds[BACKEND] else BACKEND


def _measure(
    size: int,
    device: torch.device,
    names: Sequence[str],
    reduce: Reduce,
    take_largest: Callable[[torch.Tensor], object],
) -> AlgorithmChoice:
    trial = torch.zeros(max(1, size // 4), device=device)
    taken = torch.zeros(len(names), _ROUNDS, dtype=torch.float64, device=device)
    for turn in range(-_REHEARSALS, _ROUNDS):  # interleaved: what else runs on the machine disturbs all alike
        for number, name in enumerate(names):
            began = time.perf_counter()
            reduce(name, trial)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= 0:
                taken[number, turn] = time.perf_counter() - began
    slowest = taken.median(dim=1).values
    take_largest(slowest)
    seconds = dict(zip(names, slowest.tolist(), strict=True))
    return AlgorithmChoice(size, device.type, pick(seconds), seconds)
