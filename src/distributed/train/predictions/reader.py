"""Predictions: what `Trainer.predict(to=…)` has written, row by row in the order of the dataset."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from typing import Any

from distributed.checkpoint.storage.urls import open_storage
from distributed.core.errors import DataError
from distributed.train.predictions.files import INDEX, read_index, read_shard
from distributed.train.predictions.pieces import RowPiece, merge, row_of


class Predictions:
    """The predictions of a folder or URL. Reading takes the memory of one shard for each rank that wrote them.

    >>> import torch
    >>> from distributed import Trainer
    >>> trainer = Trainer(torch.nn.Linear(4, 2), num_gpus=1, batch_size=2, progress=False)
    >>> found = trainer.predict(torch.utils.data.TensorDataset(torch.zeros(5, 4)), to=tmp / "predictions")
    >>> len(found), [tuple(row.shape) for row in found][:2], found.load().shape
    (5, [(2,), (2,)], torch.Size([5, 2]))
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._storage = open_storage(os.fspath(folder))
        index = read_index(self._storage)
        if index is None:
            raise DataError(
                f"there are no whole predictions in {self._storage.root}",
                why=f"{INDEX} is written last, and is not there",
                do="trainer.predict(loader, to=…) writes them; what a broken run has left is not read",
            )
        self._index = index
        self.path = self._storage.root

    def __len__(self) -> int:
        return self._index.rows

    def __iter__(self) -> Iterator[Any]:
        for piece in self.pieces():
            for index in range(piece.size):
                yield row_of(piece.rows, index)

    def pieces(self) -> Iterator[RowPiece]:
        """The same by batches, as the model made them."""
        ranks = [self._of_rank(number) for number in range(len(self._index.ranks))]
        if self._index.is_numbered:
            yield from heapq.merge(*ranks, key=lambda piece: piece.first)
        else:
            for own in ranks:
                yield from own

    def load(self) -> Any:
        """All rows in memory: tensors, lists where shapes differ, or tuples and dicts of these."""
        pieces = list(self.pieces())
        return merge(_in_order(pieces))

    def _of_rank(self, rank: int) -> Iterator[RowPiece]:
        for shard in self._index.ranks[rank]:
            yield from read_shard(self._storage, shard)


def _in_order(pieces: list[RowPiece]) -> list[RowPiece]:
    """Numbered as they stand: of streams that ranks read by themselves, each rank has begun at 0."""
    first, found = 0, []
    for piece in pieces:
        found.append(piece._replace(first=first))
        first += piece.size
    return found
