"""Random numbers of ranks with the same samples: equal for replicated activations, different for shards.

    shared ──(out of the first cut layer)──> of its own ──(into the layer that sums)──> shared

All such ranks have the same seed, so that dropout on replicated activations drops the same elements on all. Where a
rank has a shard (of a width, of heads, of a sequence), its mask must differ from those of other shards. A rank's own
stream begins with a number drawn from the shared one, mixed with the rank: so it is a function of the generator's
state, which recomputation of a block restores, and of the step, by which ranks are seeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_OWN = 0x5EED0000 << 32  # the upper half of the seed of a rank's own stream
_LOWER = 2**32 - 1
_STRIDE = 4  # of Philox, by which CUDA's generators count


class _State(NamedTuple):
    """The state of the shared stream, to be restored."""

    of_cpu: torch.Tensor | None
    seed: int = 0
    offset: int = 0


class RankStream:
    """The random numbers of one rank of a group: its own stream and the shared one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: _State | None = None
        self._is_off = False

    def begin(self, device: torch.device) -> None:
        """Switch to this rank's own stream, if it is not active."""
        generator = _generator_of(device)
        if not self._is_off and not _is_own(generator):
            self._shared = _begin(generator, self._rank)

    def end(self, device: torch.device) -> None:
        """Switch to the shared stream, if it is not active."""
        generator = _generator_of(device)
        if self._shared is not None and _is_own(generator):
            _go_on(generator, self._shared)
            self._shared = None

    def has_begun(self, device: torch.device) -> bool:
        return _is_own(_generator_of(device))

    @contextmanager
    def off(self) -> Iterator[None]:
        """A scope for the trial of a module, after which the random state is restored."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False


@contextmanager
def own_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """A scope for one operation that draws from this rank's own stream, whichever stream is active."""
    generator = _generator_of(device)
    before = _begin(generator, rank)
    try:
        yield
    finally:
        _go_on(generator, before)


def _begin(generator: torch.Generator, rank: int) -> _State:
    if generator.device.type == "cpu":
        drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
        number = int(drawn) if type(drawn) is torch.Tensor else 0  # in a dry run tensors hold nothing
        before = _State(generator.get_state())
    else:  # a draw would synchronize the host
        seed, offset = generator.initial_seed(), generator.get_offset()  # type: ignore[attr-defined]
        number, before = _mix(seed, offset), _State(None, seed, offset + _STRIDE)
    generator.manual_seed(_OWN | _mix(number, rank + 1) & _LOWER)
    return before


def _go_on(generator: torch.Generator, state: _State) -> None:
    if state.of_cpu is not None:
        generator.set_state(state.of_cpu)
    else:
        generator.manual_seed(state.seed)
        generator.set_offset(state.offset)  # type: ignore[attr-defined]


def _is_own(generator: torch.Generator) -> bool:
    return generator.initial_seed() & ~_LOWER == _OWN


def _mix(number: int, more: int) -> int:
    """A hash of two numbers in which every bit of both counts.

    >>> _mix(1, 2) == _mix(1, 2), _mix(1, 2) == _mix(2, 1)
    (True, False)
    """
    mixed = (number * 0x9E3779B97F4A7C15 + more * 0xC2B2AE3D27D4EB4F + 1) % 2**64
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ mixed >> 31) * factor % 2**64
    return mixed ^ mixed >> 29


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
