"""Exchanges: what a compressor asks of the ranks' collectives, without making them.

A compressor is a generator: it yields a request, is sent what came of it, and returns what the ranks have agreed on.
So it runs over any transport, and in a test over none.

    values ─ encode ─> request ─> [collective] ─> result ─ decode ─> (request …) ─> mean and what is left
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class Sum:
    """An all-reduce: the result is the sum over the ranks, which may be in place."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Gather:
    """An all-gather: the result has a row for each rank."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Swap:
    """An all-to-all: row i goes to rank i, and row i of the result is from rank i."""

    tensor: torch.Tensor


Request = Sum | Gather | Swap


class ExchangePlace(NamedTuple):
    """Where an exchange happens: on which rank of how many, in which step."""

    rank: int
    ranks: int
    step: int = 0
    seed: int = 0  # the same on all ranks


class GradientPiece(NamedTuple):
    """One parameter's gradient, with what was left of it before."""

    name: str
    shape: tuple[int, ...]
    value: torch.Tensor  # flat
    basis: torch.Tensor | None = None  # what a compressor keeps of it besides, the same on all ranks


class Reduced(NamedTuple):
    """What became of a piece: sent by all ranks, `mean` is the same on each of them."""

    mean: torch.Tensor
    left: torch.Tensor  # of this rank's value, and of rounding that it did for all: no rank has sent it
    basis: torch.Tensor | None = None


Exchange = Generator[Request, torch.Tensor, list[Reduced]]


class Compressor(Protocol):
    """Sends less than the values. Nothing is lost: the mean of values is `mean` and the mean of what is left."""

    requests: int  # that an exchange makes, one after the other

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it sends fewer bytes for a tensor of this shape."""

    def exchange(self, pieces: Sequence[GradientPiece], place: ExchangePlace) -> Exchange:
        """For pieces of the same names and shapes on all ranks."""


def exchange_alone(exchange: Exchange) -> list[Reduced]:
    """What comes of an exchange of one rank with itself."""
    result: torch.Tensor | None = None
    while True:
        try:
            request = next(exchange) if result is None else exchange.send(result)
        except StopIteration as done:
            found: list[Reduced] = done.value
            return found
        result = request.tensor[None] if isinstance(request, Gather) else request.tensor
