"""Joining: what a model gave for batch after batch, as one; where batches differ in shape, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distributed.core.errors import TaskError


def join(batches: Sequence[Any]) -> Any:
    """Batches of one structure as one: tensors along their first dimension, lists one after the other.

    Tensors that differ in another dimension, as where each batch is padded to a length of its own, become a list with
    each sample's own.

    >>> join([torch.zeros(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    >>> [tuple(row.shape) for row in join([torch.zeros(2, 3), torch.ones(1, 4)])]
    [(3,), (3,), (4,)]
    >>> join([{"text": ["a"]}, {"text": ["b", "c"]}])
    {'text': ['a', 'b', 'c']}
    """
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        kinds = sorted({type(batch).__name__ for batch in batches})
        raise TaskError(
            f"batches of different kinds cannot be put together: {' and '.join(kinds)}",
            why="what is given for one batch must have the structure of any other",
            do="return the same kind of object for every batch",
        )
    if isinstance(first, torch.Tensor):
        if len({(batch.shape[1:], batch.dtype) for batch in batches}) == 1:
            return torch.cat(list(batches))
        return [row for batch in batches for row in batch]
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        return tuple(join(list(parts)) for parts in zip(*batches, strict=True))
    if first is None:
        return None
    return [row for batch in batches for row in batch]


def count_of(batch: Any) -> int | None:
    """How many samples a batch has, by its first part that says so; None: nothing does.

    >>> count_of({"logits": torch.zeros(4, 2), "text": ["a"] * 4}), count_of(None)
    (4, None)
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    if isinstance(batch, list):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else ()
    return next((count for part in parts if (count := count_of(part)) is not None), None)


def to_host(batch: Any) -> Any:
    """The same structure on the CPU, without its graph."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().cpu()
    if isinstance(batch, Mapping):
        return {key: to_host(part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(to_host(part) for part in batch)
    if isinstance(batch, list):
        return [to_host(part) for part in batch]
    return batch
