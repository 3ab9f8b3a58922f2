"""Quantized gradients: 8 bits or 1 bit a number, with a scale for each block of them.

Ranks exchange parts (an all-to-all), each adds up its part of all ranks, quantizes the mean, and all gather the means:
2 (ranks - 1) / ranks bytes a number, at any number of ranks a quarter of a dense all-reduce of fp32. To gather whole
payloads instead takes (ranks - 1): the same for two ranks, and more than dense ones from nine ranks on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distributed.comm.compression.exchange import Exchange, ExchangePlace, Gather, GradientPiece, Reduced, Swap

BLOCK = 512  # numbers with one scale
_TINY = torch.finfo(torch.float32).tiny
_BITS = 8

Encode = Callable[[torch.Tensor], torch.Tensor]
Decode = Callable[[torch.Tensor], torch.Tensor]


def encode_int8(rows: torch.Tensor) -> torch.Tensor:
    """Rows of whole blocks as bytes: numbers from -127 to 127, then a scale for each block."""
    blocks = rows.view(len(rows), -1, BLOCK)
    scales = (blocks.abs().amax(2, keepdim=True) / 127).clamp(min=_TINY)
    numbers = (blocks / scales).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([numbers.view(len(rows), -1).view(torch.uint8), _bytes(scales, len(rows))], 1)


def decode_int8(rows: torch.Tensor) -> torch.Tensor:
    """The numbers that `encode_int8` made these bytes of, to a 127th of the largest of their block."""
    cut = rows.shape[1] // (BLOCK + 4) * BLOCK
    numbers = rows[:, :cut].contiguous().view(torch.int8).view(len(rows), -1, BLOCK)
    return (numbers * _scales(rows[:, cut:])).view(len(rows), -1)


def encode_sign(rows: torch.Tensor) -> torch.Tensor:
    """Rows of whole blocks as bytes: a bit for each number's sign, then each block's mean absolute value."""
    blocks = rows.view(len(rows), -1, BLOCK)
    scales = blocks.abs().mean(2, keepdim=True)
    weights = 1 << torch.arange(_BITS, dtype=torch.uint8, device=rows.device)
    bits = (rows >= 0).view(len(rows), -1, _BITS).to(torch.uint8)
    return torch.cat([(bits * weights).sum(2, dtype=torch.uint8), _bytes(scales, len(rows))], 1)


def decode_sign(rows: torch.Tensor) -> torch.Tensor:
    """Of each number its sign, with the mean absolute value of its block."""
    cut = rows.shape[1] // (BLOCK // _BITS + 4) * (BLOCK // _BITS)
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=rows.device)
    bits = (rows[:, :cut, None] >> shifts) & 1
    signs = bits.view(len(rows), -1, BLOCK).to(torch.float32).mul_(2).sub_(1)
    return (signs * _scales(rows[:, cut:])).view(len(rows), -1)


class Quantized:
    """Sends each number in fewer bits. What the owner of a part rounds off its mean joins what is left on it."""

    requests = 2

    def __init__(self, encode: Encode, decode: Decode) -> None:
        self._encode, self._decode = encode, decode

    def fits(self, shape: tuple[int, ...]) -> bool:
        return True

    def exchange(self, pieces: Sequence[GradientPiece], place: ExchangePlace) -> Exchange:
        sizes = [piece.value.numel() for piece in pieces]
        total, part = sum(sizes), -(-sum(sizes) // (place.ranks * BLOCK)) * BLOCK
        padding = pieces[0].value.new_zeros(place.ranks * part - total)
        rows = torch.cat([*(piece.value for piece in pieces), padding]).view(place.ranks, part)
        payload = self._encode(rows)
        left = (rows - self._decode(payload)).view(-1)
        received = yield Swap(payload)

        start = place.rank * part
        mean = self._decode(received).mean(0, keepdim=True)  # of this rank's part: rows are added in the ranks' order
        mean[:, max(0, total - start) :] = 0  # beyond the last number
        final = self._encode(mean)
        left[start : start + part].add_((mean - self._decode(final)).view(-1), alpha=place.ranks)
        means = self._decode((yield Gather(final.view(-1)))).view(-1)
        cut = zip(means[:total].split(sizes), left[:total].split(sizes), strict=True)
        return [Reduced(whole, rest) for whole, rest in cut]


def _bytes(scales: torch.Tensor, rows: int) -> torch.Tensor:
    return scales.to(torch.float32).contiguous().view(rows, -1).view(torch.uint8)


def _scales(payload: torch.Tensor) -> torch.Tensor:
    return payload.contiguous().view(torch.float32)[:, :, None]
