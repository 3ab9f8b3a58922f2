"""Reductions: all-reduce by the backend or by an algorithm of ours, reduce, reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from distributed.comm.algorithms.choice import BACKEND, AlgorithmChoice, choices_in, choose
from distributed.comm.algorithms.run import ALGORITHMS, nodes_of, reduce_by
from distributed.comm.groups.buffers import Buffer, Op, check_op
from distributed.comm.groups.calls import CollectiveCall, caller
from distributed.comm.groups.places import Handle, Place, done, place_in
from distributed.core.errors import TaskError
from distributed.runtime.torch_compat import reduce_scatter_flat

Algorithm = Literal["auto", "backend", "ring", "doubling", "tree", "two_level"]
_ANY = "ring"  # for dtypes that a backend cannot add


def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
    algorithm: Algorithm = "backend",
) -> Any:
    """The sum (or avg, max, min, product) over all ranks, in place on each; all get the same bytes.

    A dtype that the backend cannot add goes over the ring. `algorithm="auto"` measures at the first tensor of a size.

    >>> all_reduce(torch.ones(2))
    tensor([1., 1.])
    """
    check_op(op, tensor.dtype)
    if algorithm not in ("auto", BACKEND, *ALGORITHMS):
        raise TaskError(f"algorithm={algorithm!r}", do=f"choose one of: auto, {BACKEND}, {', '.join(ALGORITHMS)}")
    place = place_in(group)
    if place is None or place.size == 1:
        return done(tensor) if async_op else tensor
    buffer = Buffer(tensor, place)
    is_any = buffer.reducible(op) is None and algorithm in (BACKEND, "auto")
    if async_op and algorithm != BACKEND and not is_any:
        raise TaskError(
            f"async_op=True with algorithm={algorithm!r}",
            why="the algorithms run in the thread that calls them",
            do="leave one of the two out",
        )
    way: str = _ANY if is_any else algorithm
    what = ("all_reduce", op, way if way != BACKEND else "", tensor.dtype, tensor.shape)
    where = caller()
    call = place.begin(what, name=name, where=where, device=buffer.device, timeout_s=timeout_s)
    if way == "auto":
        way = _chosen(place, call, buffer).algorithm
    if way == BACKEND:
        work = _start(place, call, buffer, op)
        return conclude(place, call, work, buffer.device, lambda: _averaged(buffer, op, place), async_op=async_op)
    with place.waiting(call):
        reduce_by(way, buffer.flat, op, place, call)
    result = _averaged(buffer, op, place)
    return done(result) if async_op else result


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: Op = "sum",
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """The sum over all ranks, in place on rank `dst`; the others' tensors stay as they are.

    >>> reduce(torch.ones(2))
    tensor([1., 1.])
    """
    check_op(op, tensor.dtype)
    place = place_in(group)
    if place is None or place.size == 1:
        return done(tensor) if async_op else tensor
    if dst not in place.ranks:
        raise TaskError(f"reduce to rank {dst}", why=f"the group has the ranks {place.ranks}", do="name one of these")
    is_taken = place.watch.rank == dst
    buffer = Buffer(tensor if is_taken else tensor.clone(), place)  # backends leave parts of the sum in it
    what = ("reduce", op, f"to rank {dst}", tensor.dtype, tensor.shape)
    call = place.begin(what, name=name, where=caller(), device=buffer.device, timeout_s=timeout_s)
    reducible = buffer.reducible(op)
    if reducible is None:
        work = None
        with place.waiting(call):
            reduce_by("tree", buffer.flat, op, place, call)
    else:
        with place.named(call, buffer.device):
            work = dist.reduce(reducible[0], dst, op=reducible[1], group=place.group, async_op=True)

    def taken() -> torch.Tensor:
        return _averaged(buffer, op, place) if is_taken else tensor

    return conclude(place, call, work, buffer.device, taken, async_op=async_op)


def reduce_scatter(
    rows: torch.Tensor,
    op: Op = "sum",
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """Each rank has a row for every rank, and gets the sum of the rows that are for it.

    >>> reduce_scatter(torch.ones(1, 2))
    tensor([1., 1.])
    """
    check_op(op, rows.dtype)
    place = place_in(group)
    check_rows(rows, place)
    if place is None or place.size == 1:
        return done(rows[0].clone()) if async_op else rows[0].clone()
    buffer, own = Buffer(rows, place), torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    result = Buffer(own, place, is_input=False)
    what = ("reduce_scatter", op, rows.dtype, rows.shape)
    call = place.begin(what, name=name, where=caller(), device=buffer.device, timeout_s=timeout_s)
    reducible, into = buffer.reducible(op), result.reducible(op)
    if reducible is None or into is None:
        work, summed = None, buffer.flat.clone()
        with place.waiting(call):
            reduce_by(_ANY, summed, op, place, call)
        result.flat.copy_(summed.view(place.size, -1)[place.rank])
    else:
        with place.named(call, buffer.device):
            work = reduce_scatter_flat(into[0], reducible[0], op=reducible[1], group=place.group)
    return conclude(place, call, work, buffer.device, lambda: _averaged(result, op, place), async_op=async_op)


def auto_choices(group: Any = None) -> list[AlgorithmChoice]:
    """What `algorithm="auto"` has chosen so far in a group, each with the times that it was chosen by."""
    place = place_in(group)
    return [] if place is None else choices_in(place)


def conclude(
    place: Place, call: CollectiveCall, work: Any, device: torch.device, result: Callable[[], Any], *, async_op: bool
) -> Any:
    """Wait and return the result, or a handle that does."""

    def finish() -> Any:
        place.wait(call, work, device)
        return result()

    if not async_op:
        return finish()
    return Handle((lambda: True) if work is None else work.is_completed, finish)


def check_rows(rows: torch.Tensor, place: Place | None) -> None:
    """One row for each rank."""
    size = 1 if place is None else place.size
    if rows.dim() == 0 or rows.shape[0] != size:
        raise TaskError(
            f"a tensor of shape {list(rows.shape)} in place of {size} rows",
            why="it has a row for each rank of the group",
            do="tensor.view(world_size, -1)",
        )


def _start(place: Place, call: CollectiveCall, buffer: Buffer, op: str) -> Any:
    reducible = buffer.reducible(op)
    assert reducible is not None
    with place.named(call, buffer.device):
        return dist.all_reduce(reducible[0], op=reducible[1], group=place.group, async_op=True)


def _averaged(buffer: Buffer, op: str, place: Place) -> torch.Tensor:
    if op == "avg":
        buffer.flat.div_(place.size)
    return buffer.give_back()


def _chosen(place: Place, call: CollectiveCall, buffer: Buffer) -> AlgorithmChoice:
    """Measured with float32 sums: what is compared is how bytes go over the links."""

    def reduce_trial(name: str, trial: torch.Tensor) -> None:
        if name == BACKEND:
            place.wait(call, _start(place, call, Buffer(trial, place), "sum"), trial.device)
        else:
            with place.waiting(call):
                reduce_by(name, trial, "sum", place, call)

    def take_largest(seconds: torch.Tensor) -> None:
        place.wait(call, _start(place, call, Buffer(seconds, place), "max"), seconds.device)

    names = [BACKEND, *(name for name in ALGORITHMS if name != "two_level" or len(nodes_of(place)) > 1)]
    size = buffer.flat.numel() * buffer.flat.itemsize
    return choose(place, size, buffer.device, names=names, reduce=reduce_trial, take_largest=take_largest)
