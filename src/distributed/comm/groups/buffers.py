"""Buffers: tensors as backends send them right: dense, in order, of a dtype and on a device that they know.

gloo sends permuted tensors wrongly without an error, and no GPU tensors from one process to another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from distributed.comm.groups.places import Place
from distributed.core.errors import TaskError

Op = Literal["sum", "avg", "max", "min", "product"]
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OPS: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "avg": (dist.ReduceOp.SUM, torch.add),  # divided at the end: gloo has no other way
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
}
_OF_BOOLS = {"sum": "max", "max": "max", "product": "min", "min": "min"}  # as bytes 0 and 1
_REDUCED = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip


def check_op(op: str, dtype: torch.dtype) -> None:
    """Before anything is sent: what no rank can compute."""
    if op not in OPS:
        raise TaskError(f"op={op!r}", why="a reduction is one of the known ones", do=f"choose one of: {', '.join(OPS)}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise TaskError(f"an average of {dtype} tensors", why="it is no integer", do="tensor.float(), or op='sum'")
    if op in ("max", "min") and dtype.is_complex:
        raise TaskError(f"op={op!r} of {dtype} tensors", why="complex numbers have no order", do="reduce tensor.abs()")


class Buffer:
    """A tensor as one flat piece of memory that can be sent; `give_back` makes the tensor what the buffer is."""

    def __init__(self, tensor: torch.Tensor, place: Place, *, is_input: bool = True) -> None:
        if tensor.layout is not torch.strided:
            raise TaskError(f"a {tensor.layout} tensor", why="only dense tensors are sent", do="tensor.to_dense()")
        self.tensor = tensor
        plain = tensor.detach().resolve_conj().resolve_neg()
        goes_by_host = tensor.device.type == "cuda" and place.backend("cuda")[0] == "gloo"
        if goes_by_host:
            plain = plain.cpu()
        self.flat = plain.contiguous().view(-1) if is_input else _like(plain)
        self._is_own = self.flat.data_ptr() != self.tensor.data_ptr() or self.flat.device != self.tensor.device

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def bytes(self) -> torch.Tensor:
        """For what is only moved: any dtype is bytes."""
        return self.flat.view(torch.uint8)

    def reducible(self, op: str) -> tuple[torch.Tensor, Any] | None:
        """The same memory and torch's operation, for a backend to reduce; None: of this dtype it cannot."""
        if self.flat.dtype is torch.bool:
            return self.bytes, OPS[_OF_BOOLS[op]][0]
        if self.flat.is_complex() and op in ("sum", "avg"):
            return torch.view_as_real(self.flat).view(-1), OPS[op][0]
        return (self.flat, OPS[op][0]) if self.flat.dtype in _REDUCED else None

    def give_back(self) -> torch.Tensor:
        if self._is_own:
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))
        elif not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)  # so that a backward pass of the old numbers raises
        return self.tensor


def _like(plain: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory where that can be written to in order; else memory of the same size."""
    if plain.is_contiguous():
        return plain.view(-1)
    return torch.empty(plain.numel(), dtype=plain.dtype, device=plain.device)
