"""GradientCompression: compressed gradients as tensors, in a loop of the user's own or to see what a kind leaves."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from distributed.comm.compression.exchange import ExchangePlace, GradientPiece, exchange_alone
from distributed.comm.compression.kinds import CASTS, KINDS, make_compressor
from distributed.core.errors import ConfigError


class GradientCompression:
    """What the receivers of compressed gradients get, by default those with the largest tenth of their numbers.

    Shapes and types stay; None, for a parameter without a gradient, stays None. Nothing is sent, and nothing kept for a
    next step: in a run, the setting `compression` does both.

    >>> compression = GradientCompression(compression_ratio=0.5)
    >>> compressed = compression.compress_gradients([torch.tensor([1.0, -3.0, 2.0, 0.5]), None])
    >>> compressed
    [tensor([ 0., -3.,  2.,  0.]), None]
    >>> compression.decompress_gradients(compressed) == compressed
    True
    """

    def __init__(self, compression_ratio: float = 0.1, *, kind: str = "topk", rank: int = 4, seed: int = 0) -> None:
        """`compression_ratio`: for topk and randomk; `rank`: for powersgd; `seed`: for randomk and powersgd."""
        if kind not in KINDS:
            raise ConfigError(f"there is no compression {kind!r}", do=f"take one of {', '.join(KINDS)}")
        if not 0 < compression_ratio <= 1:
            why = "it is the part of a gradient's numbers that is sent"
            raise ConfigError(f"compression_ratio is {compression_ratio}", why=why, do="set 0.1, say; at most 1")
        if rank < 1:
            raise ConfigError(f"rank is {rank}", why="a product of matrices has rank 1 or more", do="set 4, say")
        self.compression_ratio, self.kind, self.rank = compression_ratio, kind, rank
        self._seed, self._step = seed, 0

    @torch.no_grad()
    def compress_gradients(self, gradients: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of each gradient what is sent, zeros elsewhere; the gradients stay as they are."""
        found = [self._compress(str(at), gradient) for at, gradient in enumerate(gradients)]
        self._step += 1
        return found

    def decompress_gradients(self, compressed_gradients: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The same: they are dense already."""
        return list(compressed_gradients)

    def _compress(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or not gradient.numel():
            return gradient
        if gradient.is_sparse or not (gradient.is_floating_point() or gradient.is_complex()):
            what = "sparse" if gradient.is_sparse else f"of type {gradient.dtype}"
            why = "compression chooses among the numbers of a dense gradient"
            raise ConfigError(f"gradient {name} is {what}", why=why, do="leave it out of the list")
        if gradient.is_complex():
            halves = torch.view_as_real(gradient.resolve_conj().contiguous())
            kept = self._compress(name, halves)
            assert kept is not None
            return torch.view_as_complex(kept)
        if self.kind in CASTS:
            return gradient.to(CASTS[self.kind]).to(gradient.dtype)
        compressor = make_compressor(self.kind, ratio=self.compression_ratio, rank=self.rank)
        shape = tuple(gradient.shape)
        if not compressor.fits(shape):  # the factors of a vector are no smaller than it
            return gradient.clone()
        flat = gradient.detach().reshape(-1)
        value = flat.to(torch.promote_types(gradient.dtype, torch.float32))
        (reduced,) = exchange_alone(
            compressor.exchange(
                [GradientPiece(name, shape, value)], ExchangePlace(0, 1, step=self._step, seed=self._seed)
            )
        )
        return reduced.mean.to(gradient.dtype).view(shape)
