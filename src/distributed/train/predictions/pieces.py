"""Pieces: the predictions of one batch, with their place among all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from distributed.core.errors import TaskError
from distributed.data.loading.loader import EvalLoader
from distributed.strategies.base import Strategy
from distributed.train.joining import join, to_host

_SCALARS = (str, int, float, bool, type(None))
_DO = "return tensors with a row for each sample, a tuple or dict of such, or a list with an entry for each sample"


class RowPiece(NamedTuple):
    """Some rows: a tensor with as many rows, a list with as many entries, or a tuple or dict of these."""

    first: int  # the number of the first of them
    size: int
    rows: Any


def predict(strategy: Strategy, loader: EvalLoader) -> Iterator[RowPiece]:
    """The pieces of this rank, in their order. Ranks that share the work on samples have them on one of these."""
    strategy.train(False)
    for batch, size in loader:
        found = strategy.predict_step(batch)
        if not strategy.owns_metrics or not size:
            continue
        rows = to_host(found)
        check_rows(rows, size)
        yield RowPiece(loader.position, size, rows)


def check_rows(rows: Any, size: int, path: str = "") -> None:
    """Raise unless a batch's predictions have a row for each of its samples.

    >>> check_rows({"logits": torch.zeros(4, 2), "text": ["a", "b", "c", "d"]}, 4)
    """
    where = f"predict_step returned{f' at {path}' if path else ''}"
    if isinstance(rows, torch.Tensor):
        if not rows.dim() or len(rows) != size:
            raise _odd(f"{where} a tensor of shape {list(rows.shape)} for {size} samples")
    elif isinstance(rows, list):
        if len(rows) != size:
            raise _odd(f"{where} a list of {len(rows)} for {size} samples")
        for row in rows:
            _check_entry(row, path)
    elif isinstance(rows, Mapping | tuple):
        parts = rows.items() if isinstance(rows, Mapping) else enumerate(rows)
        if not rows:
            raise _odd(f"{where} nothing")
        for name, part in parts:
            check_rows(part, size, f"{path}.{name}" if path else str(name))
    else:
        raise _odd(f"{where} a {type(rows).__name__}")


def merge(pieces: Sequence[RowPiece]) -> Any:
    """All rows as one object: tensors, lists, or tuples and dicts of them."""
    if not pieces:
        return []
    return join([piece.rows for piece in sorted(pieces, key=lambda piece: piece.first)])


def row_of(rows: Any, index: int) -> Any:
    """One row of a piece.

    >>> row_of({"score": torch.tensor([1.0, 2.0]), "text": ["a", "b"]}, 1)
    {'score': tensor(2.), 'text': 'b'}
    """
    if isinstance(rows, Mapping):
        return {name: row_of(part, index) for name, part in rows.items()}
    if isinstance(rows, tuple):
        return tuple(row_of(part, index) for part in rows)
    return rows[index]


def _check_entry(entry: Any, path: str) -> None:
    """Of a list: what a file could hold."""
    if isinstance(entry, Mapping):
        for part in entry.values():
            _check_entry(part, path)
    elif isinstance(entry, list | tuple):
        for part in entry:
            _check_entry(part, path)
    elif not isinstance(entry, (torch.Tensor, *_SCALARS)):
        raise _odd(f"predict_step returned a list with a {type(entry).__name__} in it")


def _odd(what: str) -> TaskError:
    return TaskError(what, why="every row of the dataset has its own prediction, which is found by its number", do=_DO)
