"""Whole gradients whose reduction is measured: the buckets of the run itself, over its own link, in its first steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distributed.comm.compression.exchange import Gather, Request, Sum
from distributed.comm.compression.prediction import BucketCost, GradientLink, WireRound, wire_bytes
from distributed.runtime.session import Session
from distributed.strategies.data_parallel.compressed_gradients import CompressedGradients, Rounds

_NAME = "gradients, to measure the link"
_ANY = 1e30  # bytes a second, of a link that nothing is sent over
_SMALL = 3  # collectives of one number, of which the quickest is the latency
_TRIES = 2  # of a kind on each bucket: the first one also allocates memory

Mark = Any  # a host's time, or a CUDA event


class Stopwatch:
    """Times of work on a device, without waiting for it before they are read."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Mark:
        if not self._is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        if not self._is_cuda:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class BucketCopy(NamedTuple):
    """A bucket that a kind is tried on, so that the gradients stay as they are."""

    numbers: torch.Tensor
    trained: Sequence[torch.Tensor]

    def buffer(self) -> torch.Tensor:
        return self.numbers

    def parameters(self) -> Sequence[torch.Tensor]:
        return self.trained


class MeasuredGradients(CompressedGradients):
    """Sums of whole gradients, as DDP makes them, with what they take."""

    def __init__(self, session: Session) -> None:
        self._session, self._watch = session, Stopwatch(session.device)
        self._flights, self._rounds = [], 1
        self.is_alone = False  # whether collectives wait for the end of the backward pass, one after the other
        self.trial: CompressedGradients | None = None  # a kind that is tried beside
        self._begun: Mark = None
        self._ended: Mark = None
        self._ready: list[Mark] = []
        self._sent_bytes: list[float] = []
        self._small: list[tuple[Mark, Mark]] = []
        self._alone: list[tuple[Mark, Mark]] = []
        self._held: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._tried: list[BucketCost] = []

    def step_begins(self) -> None:
        self._begun, self._ready, self._ended, self._sent_bytes = self._watch.mark(), [], None, []

    def ready_s(self) -> tuple[float, ...]:
        """When the buckets of the last step had their gradients."""
        return tuple(self._watch.seconds(self._begun, mark) for mark in self._ready)

    def reduced_s(self) -> float:
        """When all buckets of the last step were reduced."""
        return self._watch.seconds(self._begun, self._ended) if self._ready else 0.0

    def whole(self) -> tuple[BucketCost, ...]:
        """What whole gradients take."""
        return tuple(BucketCost((WireRound(0.0, sent, 1),)) for sent in self._sent_bytes)

    def link(self) -> GradientLink:
        """Of the step whose collectives were alone."""
        if not self._alone:  # no bucket at all
            return GradientLink(_ANY, 0.0)
        seconds = self._watch.seconds
        latency = min(seconds(*marks) for marks in self._small)
        took = sum(max(0.0, seconds(*marks) - latency) for marks in self._alone)
        return GradientLink(sum(self._sent_bytes) / max(took, 1e-9), latency)

    def tried(self) -> tuple[BucketCost, ...]:
        """What the kind takes that was tried in the last step; (): there was no memory for it."""
        found, self._tried, self.trial = self._tried, [], None
        return tuple(found) if len(found) == len(self._ready) else ()

    def rounds_of(self, bucket: dist.GradBucket) -> Rounds:
        buffer = bucket.buffer()
        buffer.mul_(1 / self._session.world_size)  # before the sum, as DDP does
        yield (Sum(buffer),)

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self._ready.append(self._watch.mark())
        self._sent_bytes.append(wire_bytes(Sum(buffer), self._session.world_size))
        if self.trial is not None:
            self._try(self.trial, bucket)
        if not self.is_alone:
            future = super().reduce_bucket(bucket)
        else:
            future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)  # type: ignore[list-item]
            self._held = [] if bucket.index() == 0 else self._held
            self._held.append((future, buffer))
            if bucket.is_last():
                self._reduce_held()
        if bucket.is_last():
            self._ended = self._watch.mark()
        return future

    @torch.no_grad()
    def _reduce_held(self) -> None:
        """One bucket after the other, once all ranks are here."""
        session, mark = self._session, self._watch.mark
        one = torch.zeros(1, device=session.device)
        session.sum(_NAME, one)
        self._small, self._alone = [], []
        for _ in range(_SMALL):
            begun = mark()
            session.sum(_NAME, one)
            self._small.append((begun, mark()))
        for future, buffer in self._held:
            begun = mark()
            buffer.mul_(1 / session.world_size)
            with session.named(_NAME):
                dist.all_reduce(buffer)
            self._alone.append((begun, mark()))
            future.set_result(buffer)
        self._held = []

    @torch.no_grad()
    def _try(self, reducer: CompressedGradients, bucket: dist.GradBucket) -> None:
        """A kind's own work on a bucket, and what it would send; nothing is sent."""
        try:
            for _ in range(_TRIES):
                reducer.begin()
                cost = self._walk(reducer, BucketCopy(bucket.buffer().clone(), bucket.parameters()))
                reducer.commit()  # so that the next time is that of a later step
            self._tried.append(cost)
        except torch.OutOfMemoryError:
            self.trial = None

    def _walk(self, reducer: CompressedGradients, bucket: BucketCopy) -> BucketCost:
        mark, ranks = self._watch.mark, self._session.world_size
        began = mark()
        generator, sent, work = reducer.rounds_of(bucket), list[tuple[float, int]](), list[tuple[Mark, Mark]]()  # type: ignore[arg-type]
        requests = next(generator)
        while True:
            work.append((began, mark()))
            sent.append((sum(wire_bytes(request, ranks) for request in requests), len(requests)))
            results = tuple(_as_if_sent(request, ranks) for request in requests)
            began = mark()
            try:
                requests = generator.send(results)
            except StopIteration:
                break
        seconds = [self._watch.seconds(*marks) for marks in (*work, (began, mark()))]
        rounds = tuple(WireRound(took, *what) for took, what in zip(seconds[:-1], sent, strict=True))
        return BucketCost(rounds, seconds[-1])


def medians(times: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The median of each place over several steps.

    >>> medians([(1.0, 2.0), (1.5, 9.0), (1.2, 3.0)])
    (1.2, 3.0)
    """
    return tuple(median(place) for place in zip(*times, strict=True))


def _as_if_sent(request: Request, ranks: int) -> torch.Tensor:
    """A result of the right shape."""
    tensor = request.tensor
    return tensor.expand(ranks, *tensor.shape).contiguous() if isinstance(request, Gather) else tensor
