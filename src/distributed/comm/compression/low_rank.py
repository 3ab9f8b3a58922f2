"""PowerSGD: a gradient as the product of two thin matrices, one step of power iteration from those of the last step.

After Vogels, Karimireddy and Jaggi, 2019. What a rank keeps is what its own gradient has outside of the common
directions, not its distance from the mean of all: their means are the same, and this one does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from distributed.comm.compression.exchange import Exchange, ExchangePlace, GradientPiece, Reduced, Sum
from distributed.comm.compression.sparse import generator_of


class PowerSgd:
    """Two all-reduces: of the gradients' products with last step's directions, and with those that follow."""

    requests = 2

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def fits(self, shape: tuple[int, ...]) -> bool:
        """A matrix whose factors are smaller than it."""
        if len(shape) < 2 or not math.prod(shape):
            return False
        rows, columns = matrix_shape(shape)
        return (rows + columns) * min(self._rank, rows, columns) < rows * columns

    def exchange(self, pieces: Sequence[GradientPiece], place: ExchangePlace) -> Exchange:
        matrices = [piece.value.view(matrix_shape(piece.shape)) for piece in pieces]
        before = [self._basis(piece, place) for piece in pieces]
        projected = [matrix @ basis for matrix, basis in zip(matrices, before, strict=True)]
        summed = yield Sum(_flat(projected).div_(place.ranks))
        left = [orthonormal(factor) for factor in _cut(summed, projected)]

        own = [matrix.T @ factor for matrix, factor in zip(matrices, left, strict=True)]
        right = _cut((yield Sum(_flat(own).div_(place.ranks))), own)
        found = []
        for matrix, factor, mine, mean, basis in zip(matrices, left, own, right, before, strict=True):
            rest = (matrix - factor @ mine.T).reshape(-1)
            found.append(Reduced((factor @ mean.T).reshape(-1), rest, _next_basis(mean, basis)))
        return found

    def _basis(self, piece: GradientPiece, place: ExchangePlace) -> torch.Tensor:
        """The directions of the last step, or random ones."""
        rows, columns = matrix_shape(piece.shape)
        shape = columns, min(self._rank, rows, columns)
        if piece.basis is not None and tuple(piece.basis.shape) == shape:
            return piece.basis
        generator = generator_of(piece.name, place, piece.value.device)
        return torch.randn(shape, generator=generator, device=piece.value.device, dtype=piece.value.dtype)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor of any dimensions as a matrix: its first dimension, and all others.

    >>> matrix_shape((64, 3, 7, 7))
    (64, 147)
    """
    return shape[0], math.prod(shape[1:])


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Its columns made orthonormal one after the other, twice over; a column that adds no direction becomes zero.

    By sums and products alone, so that ranks with the same matrix get the same bytes.
    """
    found: list[torch.Tensor] = []
    for column in matrix.unbind(1):
        size = torch.linalg.vector_norm(column)
        for _ in range(2):  # once leaves as much of the earlier ones as rounding does, relative to what cancelled
            for other in found:
                column = column - other * torch.dot(other, column)
        rest = torch.linalg.vector_norm(column)
        is_new = ~(rest <= size * 1e-5)  # also for NaN, which must not become zero
        found.append(torch.where(is_new, column / rest, torch.zeros_like(column)))
    return torch.stack(found, 1)


def _next_basis(found: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """A direction in which there was nothing would find nothing again: it stays what it was."""
    return torch.where(torch.linalg.vector_norm(found, dim=0) > 0, found, before)


def _flat(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([matrix.reshape(-1) for matrix in matrices])


def _cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([matrix.numel() for matrix in like])
    return [part.view(matrix.shape) for part, matrix in zip(parts, like, strict=True)]
