"""Moves: collectives that only move bytes, so that any dtype goes: broadcast, gather, scatter, all-to-all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distributed.comm.collectives.reductions import check_rows, conclude
from distributed.comm.groups.buffers import Buffer
from distributed.comm.groups.calls import caller
from distributed.comm.groups.places import Place, done, place_in
from distributed.core.errors import TaskError
from distributed.runtime.torch_compat import all_gather_flat


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Rank `src`'s tensor to all ranks, in place.

    >>> broadcast(torch.ones(2))
    tensor([1., 1.])
    """
    place = place_in(group)
    if place is None or place.size == 1:
        return done(tensor) if async_op else tensor
    buffer = Buffer(tensor, place)
    what = ("broadcast", f"from rank {src}", tensor.dtype, tensor.shape)
    call = place.begin(what, name=name, where=caller(), device=buffer.device, timeout_s=timeout_s)
    with place.named(call, buffer.device):
        work = dist.broadcast(buffer.bytes, src, group=place.group, async_op=True)
    return conclude(place, call, work, buffer.device, buffer.give_back, async_op=async_op)


def all_gather(
    tensor: torch.Tensor,
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """A row of each rank, on all ranks.

    >>> all_gather(torch.ones(2))
    tensor([[1., 1.]])
    """
    place = place_in(group)
    if place is None or place.size == 1:
        return done(tensor[None].clone()) if async_op else tensor[None].clone()
    buffer, rows = Buffer(tensor, place), _rows(tensor, place)
    result = Buffer(rows, place, is_input=False)
    what = ("all_gather", tensor.dtype, tensor.shape)
    call = place.begin(what, name=name, where=caller(), device=buffer.device, timeout_s=timeout_s)
    with place.named(call, buffer.device):
        work = all_gather_flat(result.bytes, buffer.bytes, group=place.group)
    return conclude(place, call, work, buffer.device, result.give_back, async_op=async_op)


def gather(
    tensor: torch.Tensor,
    dst: int = 0,
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """A row of each rank, on rank `dst`; None on the others.

    >>> gather(torch.ones(2))
    tensor([[1., 1.]])
    """
    place = place_in(group)
    if place is None or place.size == 1:
        return done(tensor[None].clone()) if async_op else tensor[None].clone()
    buffer = Buffer(tensor, place)
    result = Buffer(_rows(tensor, place), place, is_input=False) if place.watch.rank == dst else None
    what = ("gather", f"to rank {dst}", tensor.dtype, tensor.shape)
    call = place.begin(what, name=name, where=caller(), device=buffer.device, timeout_s=timeout_s)
    parts = None if result is None else list(result.bytes.view(place.size, -1))
    with place.named(call, buffer.device):
        work = dist.gather(buffer.bytes, parts, dst=dst, group=place.group, async_op=True)
    return conclude(place, call, work, buffer.device, lambda: result and result.give_back(), async_op=async_op)


def scatter(
    tensor: torch.Tensor,
    rows: torch.Tensor | None = None,
    src: int = 0,
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Each rank's row of what rank `src` has, into its tensor; only `src` gives rows.

    >>> scatter(torch.zeros(2), torch.ones(1, 2))
    tensor([1., 1.])
    """
    place = place_in(group)
    is_source = place is None or place.watch.rank == src
    if is_source != (rows is not None):
        raise TaskError(f"scatter from rank {src}: {'no' if is_source else 'unused'} rows", do=f"rank {src} gives rows")
    if rows is not None:
        check_rows(rows, place)
        if rows.shape[1:] != tensor.shape or rows.dtype != tensor.dtype:
            told = f"rows of {list(rows.shape[1:])} {rows.dtype} for a tensor of {list(tensor.shape)} {tensor.dtype}"
            raise TaskError(told, do="give both the same shape and dtype")
    if place is None or place.size == 1:
        assert rows is not None
        with torch.no_grad():
            tensor.copy_(rows[0])
        return done(tensor) if async_op else tensor
    result = Buffer(tensor, place, is_input=False)
    parts = None if rows is None else list(Buffer(rows, place).bytes.view(place.size, -1))
    what = ("scatter", f"from rank {src}", tensor.dtype, tensor.shape)
    call = place.begin(what, name=name, where=caller(), device=result.device, timeout_s=timeout_s)
    with place.named(call, result.device):
        work = dist.scatter(result.bytes, parts, src=src, group=place.group, async_op=True)
    return conclude(place, call, work, result.device, result.give_back, async_op=async_op)


def all_to_all(
    rows: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Row r goes to rank r; the result has a row from each rank. Tensors in a list may differ in their first size.

    The ranks tell each other the sizes of a list first, which is a small collective of its own.

    >>> all_to_all(torch.ones(1, 2))
    tensor([[1., 1.]])
    """
    place, where = place_in(group), caller()
    if not isinstance(rows, torch.Tensor):
        return _lists_to_all(list(rows), place, where, name=name, timeout_s=timeout_s, async_op=async_op)
    check_rows(rows, place)
    if place is None or place.size == 1:
        return done(rows.clone()) if async_op else rows.clone()
    buffer = Buffer(rows, place)
    result = Buffer(torch.empty_like(rows, memory_format=torch.contiguous_format), place, is_input=False)
    what = ("all_to_all", rows.dtype, rows.shape)
    call = place.begin(what, name=name, where=where, device=buffer.device, timeout_s=timeout_s)
    with place.named(call, buffer.device):
        work = dist.all_to_all_single(result.bytes, buffer.bytes, group=place.group, async_op=True)
    return conclude(place, call, work, buffer.device, result.give_back, async_op=async_op)


def barrier(
    *, group: Any = None, name: str | None = None, timeout_s: float | None = None, async_op: bool = False
) -> Any:
    """Returns when every rank has come here."""
    place = place_in(group)
    if place is None or place.size == 1:
        return done(None) if async_op else None
    device = _device_of(place)
    call = place.begin(("barrier",), name=name, where=caller(), device=device, timeout_s=timeout_s)
    with place.named(call, device):
        work = dist.barrier(group=place.group, async_op=True)
    return conclude(place, call, work, device, lambda: None, async_op=async_op)


def _lists_to_all(
    parts: list[torch.Tensor],
    place: Place | None,
    where: Any,
    *,
    name: str | None,
    timeout_s: float | None,
    async_op: bool,
) -> Any:
    ranks = 1 if place is None else place.size
    kinds = {(part.dtype, part.shape[1:], part.device) for part in parts}
    if len(parts) != ranks or len(kinds) != 1 or parts[0].dim() == 0:
        raise TaskError(
            f"{len(parts)} tensors of {len(kinds)} kinds for {ranks} ranks",
            why="each rank gets one, and they differ in their first size alone",
            do="give a tensor for each rank, an empty one where there is nothing to send",
        )
    if place is None or place.size == 1:
        return done([parts[0].clone()]) if async_op else [parts[0].clone()]
    dtype, rest, device = next(iter(kinds))
    joined = Buffer(torch.cat(parts), place)
    what = ("all_to_all", "of lists", dtype, rest)
    call = place.begin(what, name=name, where=where, device=joined.device, timeout_s=timeout_s)
    sent = torch.tensor([len(part) for part in parts], device=joined.device)
    received = torch.empty_like(sent)
    with place.named(call, joined.device):
        sizes = dist.all_to_all_single(received, sent, group=place.group, async_op=True)
    place.wait(call, sizes, joined.device)
    lengths: list[int] = received.tolist()
    result = Buffer(torch.empty((sum(lengths), *rest), dtype=dtype, device=device), place, is_input=False)
    each = rest.numel() * dtype.itemsize
    with place.named(call, joined.device):
        work = dist.all_to_all_single(
            result.bytes,
            joined.bytes,
            [length * each for length in lengths],
            [len(part) * each for part in parts],
            group=place.group,
            async_op=True,
        )

    def taken() -> list[torch.Tensor]:
        return list(torch.split(result.give_back(), lengths))

    return conclude(place, call, work, joined.device, taken, async_op=async_op)


def _rows(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    return torch.empty((place.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)


def _device_of(place: Place) -> torch.device:
    """That barriers of the group wait on."""
    kinds = dist.get_backend_config(place.group)
    return torch.device("cuda" if "nccl" in kinds else "cpu")
