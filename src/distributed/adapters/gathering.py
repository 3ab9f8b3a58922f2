"""Objects and tensors of all ranks, on every rank: what an evaluation needs whole."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from distributed.core.errors import TaskError
from distributed.runtime.session import Session


def gather_objects(session: Session, name: str, value: Any) -> list[Any]:
    """A picklable object of each rank, in their order; every rank calls it."""
    if session.world_size == 1:
        return [value]
    found: list[Any] = [None] * session.world_size
    with session.named(name):
        dist.all_gather_object(found, value)
    return found


def gather_shares(session: Session, name: str, share: Any) -> list[Any]:
    """The same, of ranks that hold shares of data: in the order of the data, and once of ranks with the same share."""
    found: dict[int, Any] = {}
    for data_rank, one in gather_objects(session, name, (session.data_rank, share)):
        found.setdefault(data_rank, one)
    return [found[data_rank] for data_rank in sorted(found)]


def gather_rows(session: Session, name: str, values: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, one after the other; each may have another number of them, and a number is one row."""
    rows = values.detach().reshape(1) if values.dim() == 0 else values.detach()
    if session.world_size == 1:
        return rows.clone()
    shapes = [json.loads(text) for text in session.gather_texts(name, json.dumps(list(rows.shape)))]
    if len({tuple(shape[1:]) for shape in shapes}) > 1:
        raise TaskError(
            f"{name}: the ranks have tensors of the shapes {shapes}",
            why="they become one tensor, row after row",
            do="accelerator.pad_across_processes(tensor, dim=1) first",
        )
    is_bool = rows.dtype == torch.bool
    most = max(shape[0] for shape in shapes)
    padded = rows.new_zeros((most, *rows.shape[1:]), dtype=torch.uint8 if is_bool else rows.dtype)
    padded[: len(rows)] = rows
    found = session.gather(name, padded.to(session.device).contiguous())
    whole = torch.cat([part[: shape[0]] for part, shape in zip(found, shapes, strict=True)])
    return whole.bool() if is_bool else whole
