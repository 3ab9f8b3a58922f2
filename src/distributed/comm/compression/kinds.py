"""The kinds of compression by their names, as settings have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distributed.comm.compression.exchange import Compressor, Exchange, ExchangePlace, GradientPiece
from distributed.comm.compression.low_rank import PowerSgd
from distributed.comm.compression.quantized import Quantized, decode_int8, decode_sign, encode_int8, encode_sign
from distributed.comm.compression.sparse import RandomK, TopK

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}  # which round, and keep nothing


class WholeTensors:
    """Compresses nothing: tensors that do not fit are sent whole."""

    requests = 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        return False

    def exchange(self, pieces: Sequence[GradientPiece], place: ExchangePlace) -> Exchange:
        raise NotImplementedError


_LOSSY: dict[str, Callable[[float, int], Compressor]] = {
    "topk": lambda ratio, rank: TopK(ratio),
    "randomk": lambda ratio, rank: RandomK(ratio),
    "powersgd": lambda ratio, rank: PowerSgd(rank),
    "int8": lambda ratio, rank: Quantized(encode_int8, decode_int8),
    "onebit": lambda ratio, rank: Quantized(encode_sign, decode_sign),
}
KINDS = (*CASTS, *_LOSSY)
_NOTHING_LOST = ("none", "auto")  # of auto while nothing is chosen


def make_compressor(kind: str, *, ratio: float, rank: int) -> Compressor:
    """A kind that keeps what it does not send. `ratio` is of the sparse ones, `rank` of PowerSGD.

    "none": all is sent, with what was left before.
    """
    return WholeTensors() if kind in _NOTHING_LOST else _LOSSY[kind](ratio, rank)
