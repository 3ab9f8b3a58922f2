"""Messages from one rank to another: send and recv, by the ranks of the whole world, as torch's are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distributed.comm.groups.buffers import Buffer
from distributed.comm.groups.calls import caller
from distributed.comm.groups.places import Handle, Place, place_in
from distributed.core.errors import TaskError


def send(
    tensor: torch.Tensor,
    dst: int,
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """A tensor to rank `dst`, which calls `recv`."""
    place = _with_peer(place_in(group), dst)
    buffer = Buffer(tensor, place)
    what = ("send", tensor.dtype, tensor.shape)
    call = place.begin_message(what, name=name, where=caller(), device=buffer.device, timeout_s=timeout_s, peer=dst)
    place.compare_message(call, dst)
    with place.named(call, buffer.device):
        work = dist.isend(buffer.bytes, dst, group=place.group)
        assert work is not None  # this rank is in the group

    def finish() -> torch.Tensor:
        place.wait(call, work, buffer.device, [dst])
        return tensor

    return Handle(work.is_completed, finish) if async_op else finish()


def recv(
    tensor: torch.Tensor,
    src: int,
    *,
    group: Any = None,
    name: str | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> Any:
    """What rank `src` sends, into a tensor of its shape and dtype."""
    place = _with_peer(place_in(group), src)
    buffer = Buffer(tensor, place, is_input=False)
    what = ("recv", tensor.dtype, tensor.shape)
    call = place.begin_message(what, name=name, where=caller(), device=buffer.device, timeout_s=timeout_s, peer=src)
    place.compare_message(call, src, waits=not async_op)
    with place.named(call, buffer.device):
        work = dist.irecv(buffer.bytes, src, group=place.group)
        assert work is not None  # this rank is in the group

    def finish() -> torch.Tensor:
        if async_op:  # not before: the sender may itself wait for a message from here
            place.compare_message(call, src)
        place.wait(call, work, buffer.device, [src])
        return buffer.give_back()

    return Handle(work.is_completed, finish) if async_op else finish()


def _with_peer(place: Place | None, peer: int) -> Place:
    if place is None or peer not in place.ranks or peer == place.watch.rank:
        ranks = [0] if place is None else place.ranks
        raise TaskError(
            f"a message to or from rank {peer}",
            why=f"the group has the ranks {ranks}, and a rank has no messages for itself",
            do="name another rank of the group, by its rank in the world",
        )
    return place
