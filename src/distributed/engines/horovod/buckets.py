"""Gradient buckets for Horovod: sums that depend on the gradients alone, not on when they are ready.

Horovod fuses what is ready in one of its cycles, and its ring adds each part of a fused buffer in another order of the
ranks. With three ranks or more the last digits of a sum then depend on timing. Here the buckets are made once, of the
parameters, and one is on its way at a time: Horovod never finds two to fuse, however it was initialised.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from distributed.core.errors import TaskError
from distributed.engines.horovod.ring import Ring
from distributed.runtime.torch_compat import foreach_copy_

DEFAULT_MB = 25.0
_ON_WIRE = {torch.bfloat16: torch.float32}  # Horovod has no sum of bf16
_COMPRESSED = (torch.float32, torch.float64)  # by compression='fp16'

Member = tuple[str, torch.Tensor]  # a parameter with its name


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that go over the wire as one tensor of this dtype."""

    members: tuple[Member, ...]
    dtype: torch.dtype

    @functools.cached_property
    def name(self) -> str:
        """The same on every rank, and another one for each bucket.

        >>> Bucket((("2.bias", torch.zeros(3)), ("2.weight", torch.zeros(3, 4))), torch.float32).name
        'gradient.2.bias and 1 more'
        """
        more = f" and {len(self.members) - 1} more" if len(self.members) > 1 else ""
        return f"gradient.{self.members[0][0]}{more}"


def make_buckets(named: Iterable[Member], max_bytes: float, *, compresses: bool) -> list[Bucket]:
    """Buckets in the order in which a backward pass fills them; a parameter above the size has one of its own.

    >>> layers = [("a", torch.zeros(4)), ("b", torch.zeros(2)), ("c", torch.zeros(1))]
    >>> [bucket.name for bucket in make_buckets(layers, 16, compresses=False)]
    ['gradient.c and 1 more', 'gradient.a']
    """
    filled: list[Bucket] = []
    open_ones: dict[torch.dtype, tuple[list[Member], int]] = {}  # with their bytes, in the order of last members
    for name, parameter in reversed(list(named)):
        dtype = wire_dtype(parameter, compresses=compresses)
        size = real(parameter).numel() * dtype.itemsize
        members, held = open_ones.pop(dtype, ([], 0))
        if members and held + size > max_bytes:
            filled.append(Bucket(tuple(members), dtype))
            members, held = [], 0
        members.append((name, parameter))
        open_ones[dtype] = (members, held + size)
    return filled + [Bucket(tuple(members), dtype) for dtype, (members, _) in open_ones.items()]


class BucketReducer:
    """Sends each bucket when it is full and the one before it has come back; on all ranks in the same order."""

    def __init__(self, hvd: Any, ring: Ring, buckets: list[Bucket]) -> None:
        self._hvd, self._ring, self._buckets = hvd, ring, buckets
        self._parts = dict(_lay_out(buckets))
        self._bucket_of = {name: bucket for bucket in buckets for name, _ in bucket.members}
        self._sent: tuple[int, torch.Tensor] | None = None  # Horovod's handle, and what it reduces in place
        self._begin()

    def _begin(self) -> None:
        self._left = deque(self._buckets)  # with the one that is on its way
        self._lacking = {bucket: len(bucket.members) for bucket in self._buckets}
        self.missing = set(self._bucket_of)  # parameters whose gradients are not whole yet

    def add(self, name: str) -> None:
        """The gradient of this parameter is whole: send what can be sent, and wait for nothing."""
        if name not in self.missing:
            raise TaskError(
                f"the gradient of {name} came twice in one backward pass",
                why="after the first time, the gradient may be on its way to the other ranks",
                do="use checkpoint(..., use_reentrant=False), and call backward() once for a micro-batch",
            )
        self.missing.remove(name)
        self._lacking[self._bucket_of[name]] -= 1
        try:
            self._go_on()
        except (RuntimeError, ValueError) as failed:  # Horovod may have ended before this rank sends
            self._ring.raise_if_lost(self._left[0].name, failed)
            raise

    def _go_on(self) -> None:
        if self._sent is not None and self._hvd.poll(self._sent[0]):
            self._receive()
        if self._sent is None and self._left and not self._lacking[self._left[0]]:
            self._send()

    def finish(self) -> None:
        """Wait until every gradient is the average of all ranks."""
        assert not self.missing
        with self._ring.wait("gradients", self._left):
            while self._left:
                if self._sent is None:
                    self._send()
                self._receive()
        self._begin()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._left[0]
        if len(bucket.members) == 1:
            wire = as_wire(_gradient(bucket.members[0][1]), bucket.dtype)
        else:
            wire, parts = self._parts[bucket]
            foreach_copy_(parts, [_gradient(parameter) for _, parameter in bucket.members])
        self._sent = self._hvd.allreduce_async_(wire, name=bucket.name, op=self._hvd.Average), wire

    @torch.no_grad()
    def _receive(self) -> None:
        assert self._sent is not None
        (handle, wire), bucket = self._sent, self._left[0]
        self._hvd.synchronize(handle)
        gradients = [_gradient(parameter) for _, parameter in bucket.members]
        if len(gradients) > 1:
            foreach_copy_(gradients, self._parts[bucket][1])
        elif wire.data_ptr() != gradients[0].data_ptr():
            gradients[0].copy_(wire)
        self._sent = None
        self._left.popleft()


def _lay_out(buckets: list[Bucket]) -> Iterator[tuple[Bucket, tuple[torch.Tensor, list[torch.Tensor]]]]:
    """The wire of each bucket of several gradients, and its parts in their shapes.

    All of a dtype are laid into the same memory, since one is on its way at a time.
    """
    several = [bucket for bucket in buckets if len(bucket.members) > 1]
    sizes = {bucket: [real(parameter).numel() for _, parameter in bucket.members] for bucket in several}
    memory: dict[torch.dtype, torch.Tensor] = {}
    for dtype in {bucket.dtype for bucket in several}:
        longest = max(sum(sizes[bucket]) for bucket in several if bucket.dtype == dtype)
        memory[dtype] = torch.empty(longest, dtype=dtype, device=several[0].members[0][1].device)
    for bucket in several:
        wire = memory[bucket.dtype][: sum(sizes[bucket])]
        parts = zip(wire.split(sizes[bucket]), bucket.members, strict=True)
        yield bucket, (wire, [part.view(real(parameter).shape) for part, (_, parameter) in parts])


def wire_dtype(tensor: torch.Tensor, *, compresses: bool) -> torch.dtype:
    """What this tensor's gradient is on the wire."""
    dtype = real(tensor).dtype
    return torch.float16 if compresses and dtype in _COMPRESSED else _ON_WIRE.get(dtype, dtype)


def as_wire(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself where Horovod can reduce that in place, or a copy."""
    return tensor.to(dtype).contiguous()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, which is how Horovod can send them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return real(parameter.grad)
