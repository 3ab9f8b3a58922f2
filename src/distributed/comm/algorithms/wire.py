"""Wire: an algorithm's messages. Sends and receives are posted together, so that no order of ranks can deadlock.

An algorithm is a generator over one slice of the tensor: it yields what it sends and receives next, and goes on once
that is done. A tensor is cut into several slices whose generators take turns, so that one slice is added while others
are on their way:

    slice 0   [ exchange ][ add ][ exchange ]……
    slice 1   [ exchange ]       [ add ][ exchange ]……
    slice 2   [ exchange ]              [ add ]……
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distributed.comm.groups.calls import CollectiveCall
from distributed.comm.groups.places import Place

TAG = 1 << 16  # of what is no user's message: gloo would give it to a receive that waits for one
Message = tuple[torch.Tensor, int]  # what, and the peer's rank in the group
Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # left, right, where their result goes


class Exchange(NamedTuple):
    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()


Steps = Generator[Exchange, None, None]


class Team(NamedTuple):
    """The ranks of an algorithm, by their ranks in the group, and this one's place among them."""

    members: Sequence[int]
    me: int

    @property
    def size(self) -> int:
        return len(self.members)


class Wire:
    """For one call: every message has what is left of its deadline."""

    def __init__(self, place: Place, call: CollectiveCall, device: torch.device) -> None:
        self._place, self._call = place, call
        self.is_batched = place.backend(device.type)[0] == "nccl"

    def run(self, slices: Sequence[Steps]) -> None:
        """All slices to their ends, in turns."""
        under_way: deque[tuple[int, Steps, list[Any]]] = deque()

        def go_on(number: int, steps: Steps) -> None:
            exchange = next(steps, None)
            if exchange is not None:
                under_way.append((number, steps, self._post(exchange, number)))

        for number, steps in enumerate(slices):
            go_on(number, steps)
        while under_way:
            number, steps, works = under_way.popleft()
            for work in works:
                self._wait(work)
            go_on(number, steps)

    def _post(self, exchange: Exchange, tag: int) -> list[Any]:
        group = self._place.group
        receives = [(as_bytes(tensor), peer) for tensor, peer in exchange.receives if tensor.numel()]
        sends = [(as_bytes(tensor), peer) for tensor, peer in exchange.sends if tensor.numel()]
        with self._place.named(self._call, self._device_of([*receives, *sends])):
            if not self.is_batched:
                tag += TAG
                works = [dist.irecv(tensor, group=group, tag=tag, group_src=peer) for tensor, peer in receives]
                return works + [dist.isend(tensor, group=group, tag=tag, group_dst=peer) for tensor, peer in sends]
            posted = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in receives]
            posted += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sends]
            return list(dist.batch_isend_irecv(posted)) if posted else []

    def _wait(self, work: Any) -> None:
        if self.is_batched:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(0.001, self._call.until - time.monotonic())))

    @staticmethod
    def _device_of(messages: Sequence[Message]) -> torch.device:
        return messages[0][0].device if messages else torch.device("cpu")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory: any dtype can be sent."""
    return tensor.view(torch.uint8)


def cut(flat: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Views of about the same length; the last ones may be empty.

    >>> [part.tolist() for part in cut(torch.arange(5), 3)]
    [[0, 1], [2, 3], [4]]
    """
    length, longer = divmod(flat.numel(), parts)
    return list(torch.split(flat, [length + (part < longer) for part in range(parts)]))
