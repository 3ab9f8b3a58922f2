"""Prediction: how long the reduction of a step's gradients takes with a kind of compression, at any bandwidth. Pure.

It takes the path of the hook in `strategies/data_parallel/compressed_gradients.py`: a bucket that is ready is encoded,
and its first collective begins; the second one begins in the hook of a later bucket; the last hook waits for all. The
link carries one collective after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distributed.comm.compression.exchange import Gather, Request, Sum


@dataclass(frozen=True)
class GradientLink:
    """What a collective of all ranks takes.

    >>> GradientLink(bytes_per_s=1e6, latency_s=0.5).seconds(WireRound(0.0, wire_bytes=2e6, collectives=1))
    2.5
    """

    bytes_per_s: float  # that a rank sends while it receives as many
    latency_s: float  # of a collective of a few bytes

    def seconds(self, sent: WireRound) -> float:
        return sent.collectives * self.latency_s + sent.wire_bytes / self.bytes_per_s


class WireRound(NamedTuple):
    """The collectives of a bucket that begin together."""

    encode_s: float  # before they begin
    wire_bytes: float  # that each rank sends
    collectives: int


@dataclass(frozen=True)
class BucketCost:
    """What a bucket takes, beside the time on the link."""

    rounds: tuple[WireRound, ...]
    decode_s: float = 0.0  # after the last of them

    @property
    def own_s(self) -> float:
        return sum(sent.encode_s for sent in self.rounds) + self.decode_s

    @property
    def wire_bytes(self) -> float:
        return sum(sent.wire_bytes for sent in self.rounds)


def wire_bytes(request: Request, ranks: int) -> float:
    """The bytes that each rank sends for a collective, by the algorithms that send least.

    >>> import torch
    >>> wire_bytes(Sum(torch.zeros(100)), 2), wire_bytes(Gather(torch.zeros(100)), 3)
    (400.0, 800.0)
    """
    size = float(request.tensor.numel() * request.tensor.element_size())
    if isinstance(request, Gather):
        return size * (ranks - 1)
    return size * (2 if isinstance(request, Sum) else 1) * (ranks - 1) / ranks


def reduced_after_s(ready_s: Sequence[float], buckets: Sequence[BucketCost], link: GradientLink) -> float:
    """When all buckets are reduced, if the backward pass alone has them ready at these times.

    >>> link = GradientLink(bytes_per_s=1.0, latency_s=0.0)
    >>> dense = [BucketCost((WireRound(0.0, 4.0, 1),)), BucketCost((WireRound(0.0, 4.0, 1),))]
    >>> reduced_after_s([1.0, 2.0], dense, link)
    9.0
    """
    if not buckets:
        return 0.0
    most = max(len(bucket.rounds) for bucket in buckets)
    now = free = before = 0.0
    flights: list[_Flight] = []
    for ready, bucket in zip(ready_s, buckets, strict=True):
        now, before = now + max(0.0, ready - before), max(before, ready)
        for flight in flights:
            if flight.begun < most:
                now, free = flight.advance(now, free, link)
        flights.append(_Flight(bucket))
        now, free = flights[-1].advance(now, free, link)
    while flights:
        for flight in flights:
            now, free = flight.advance(now, free, link)
        flights = [flight for flight in flights if not flight.is_over]
    return now


class _Flight:
    """The rounds of a bucket."""

    def __init__(self, bucket: BucketCost) -> None:
        self._bucket, self.begun, self._done, self.is_over = bucket, 0, 0.0, False

    def advance(self, now: float, free: float, link: GradientLink) -> tuple[float, float]:
        """Wait for its round and begin the next one; returns the time, and when the link is free."""
        if self.is_over:
            return now, free
        if self.begun:
            now = max(now, self._done)
        if self.begun == len(self._bucket.rounds):
            self.is_over = True
            return now + self._bucket.decode_s, free
        sent = self._bucket.rounds[self.begun]
        now += sent.encode_s
        self._done = free = max(now, free) + link.seconds(sent)
        self.begun += 1
        return now, free
