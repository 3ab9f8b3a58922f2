"""Links: how long a message to the next rank and back takes, to find a rank whose connection is slow.

A collective takes as long as its slowest link on every rank, so it does not show whose link that is. Messages between
two ranks can: one ready message first, so that the time is the link's and not that of a peer that came late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from distributed.runtime.session import Session

LEAST_RANKS = 3  # of two, one link says nothing of either
_BYTES = 1 << 16
_TRIES = 3  # the quickest counts: a busy core slows a message now and then, a bad link always
_EVERY_S = 30.0  # a probe takes 1 ms, and 20 ms where ranks share cores with other work


class Links:
    """The ring of the ranks, each with the next; every rank probes at the same time."""

    def __init__(self, session: Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._clock = session, clock
        self._message, self._answer = torch.zeros(_BYTES, dtype=torch.uint8), torch.zeros(_BYTES, dtype=torch.uint8)
        self._ready = torch.zeros(1, dtype=torch.uint8)
        self._due_at = clock() + _EVERY_S
        self._seconds = 0.0

    @staticmethod
    def of(session: Session) -> Links | None:
        """None where links cannot be distinguished, or where the CPU's messages take another path than gradients."""
        can_measure = (
            session.world_size >= LEAST_RANKS and session.device.type == "cpu" and dist.get_backend() == "gloo"
        )
        return Links(session) if can_measure else None

    def is_due(self) -> bool:
        if self._clock() < self._due_at:
            return False
        self._due_at = self._clock() + _EVERY_S
        return True

    def take(self) -> float:
        """What the last probe found, once."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def probe(self) -> None:
        """Measure the link to the next rank. A rank has one talk at a time: links do not delay each other."""
        rank, ranks = self._session.rank, self._session.world_size
        with self._session.named("links between ranks"):
            for turn in range(3):
                if _turn(rank, ranks) == turn:
                    self._seconds = min(self._round_trip((rank + 1) % ranks) for _ in range(_TRIES))
                if _turn((rank - 1) % ranks, ranks) == turn:
                    for _ in range(_TRIES):
                        self._echo((rank - 1) % ranks)

    def _round_trip(self, peer: int) -> float:
        dist.recv(self._ready, peer)
        begun = time.perf_counter()
        dist.send(self._message, peer)
        dist.recv(self._answer, peer)
        return time.perf_counter() - begun

    def _echo(self, peer: int) -> None:
        dist.send(self._ready, peer)
        dist.recv(self._answer, peer)
        dist.send(self._message, peer)


def _turn(rank: int, ranks: int) -> int:
    """When a rank and its next one talk: no rank has two such talks in one turn.

    >>> [_turn(rank, 4) for rank in range(4)], [_turn(rank, 5) for rank in range(5)]
    ([0, 1, 0, 1], [0, 1, 0, 1, 2])
    """
    return 2 if ranks % 2 and rank == ranks - 1 else rank % 2
