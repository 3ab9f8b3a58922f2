"""Sparse gradients: a few numbers of each tensor travel, the largest ones or ones drawn at random."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from distributed.comm.compression.exchange import Exchange, ExchangePlace, Gather, GradientPiece, Reduced, Sum

_LARGEST_INDEX = 2**31 - 1


def count_sent(numbers: int, ratio: float) -> int:
    """How many of a tensor's numbers are sent: at least one, if it has any.

    >>> count_sent(1000, 0.01), count_sent(5, 0.01), count_sent(0, 0.01)
    (10, 1, 0)
    """
    return min(numbers, max(1, int(numbers * ratio)))


def largest(flat: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the largest absolute values; NaN is larger than all."""
    return torch.topk(flat.abs(), count, sorted=False).indices


def drawn(numbers: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Places that are all different, each as likely as any other: one of each of `count` equal stretches."""
    device = generator.device
    edges = torch.arange(count + 1, device=device) * numbers // count
    shares = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    return torch.minimum(edges[:-1] + (shares * edges.diff()).long(), edges[1:] - 1)


class SparseCompressor:
    """Sends `ratio` of each tensor's numbers, in one exchange."""

    requests = 1

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def fits(self, shape: tuple[int, ...]) -> bool:
        return True


class TopK(SparseCompressor):
    """The largest numbers of each tensor, as values and indices, gathered from all ranks.

    Ranks choose different places, so their sums have no common form to be reduced in: each rank gets all payloads,
    (ranks - 1) x 8 bytes for each number sent, and adds them in the order of ranks.
    """

    def exchange(self, pieces: Sequence[GradientPiece], place: ExchangePlace) -> Exchange:
        counts = [count_sent(piece.value.numel(), self._ratio) for piece in pieces]
        chosen = [largest(piece.value, count) for piece, count in zip(pieces, counts, strict=True)]
        is_long = any(piece.value.numel() > _LARGEST_INDEX for piece in pieces)
        index_type = torch.int64 if is_long else torch.int32
        values = torch.cat([piece.value[places] for piece, places in zip(pieces, chosen, strict=True)])
        places = torch.cat(chosen).to(index_type)
        rows = yield Gather(torch.cat([places.view(torch.uint8), values.view(torch.uint8)]))

        cut = places.numel() * places.element_size()
        means = [torch.zeros_like(piece.value) for piece in pieces]
        for row in rows:
            at = row[:cut].clone().view(index_type).long().split(counts)  # a clone is aligned
            sent = row[cut:].clone().view(values.dtype).split(counts)
            for mean, where, what in zip(means, at, sent, strict=True):
                mean.index_add_(0, where, what)  # the places of one rank are all different, so no order matters
        return [
            Reduced(mean.div_(place.ranks), piece.value.index_fill(0, places, 0))
            for mean, piece, places in zip(means, pieces, chosen, strict=True)
        ]


class RandomK(SparseCompressor):
    """Numbers at random places, which all ranks draw alike, so that only values travel and are summed on the way."""

    def exchange(self, pieces: Sequence[GradientPiece], place: ExchangePlace) -> Exchange:
        counts = [count_sent(piece.value.numel(), self._ratio) for piece in pieces]
        chosen = [
            drawn(piece.value.numel(), count, generator_of(piece.name, place, piece.value.device))
            for piece, count in zip(pieces, counts, strict=True)
        ]
        values = torch.cat([piece.value[places] for piece, places in zip(pieces, chosen, strict=True)])
        summed = yield Sum(values.div_(place.ranks))
        return [
            Reduced(torch.zeros_like(piece.value).index_copy_(0, places, sent), piece.value.index_fill(0, places, 0))
            for piece, places, sent in zip(pieces, chosen, summed.split(counts), strict=True)
        ]


def generator_of(name: str, place: ExchangePlace, device: torch.device) -> torch.Generator:
    """Random numbers that all ranks draw alike: of a tensor's name and the step."""
    text = f"{place.seed} {place.step} {name}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return torch.Generator(device).manual_seed(seed)
