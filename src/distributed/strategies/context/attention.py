"""Attention of a rank's shard of a sequence over the whole sequence: keys and values are all-gathered.

Its collectives have no name: blocks are compiled with them, and the compiler cannot trace the report of a collective.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from distributed.core.errors import PlanError
from distributed.runtime.torch_compat import flash_attention
from distributed.strategies.model.sequence_masks import SequenceMasks

HALF = (torch.float16, torch.bfloat16)


class SequencePart:
    """A rank's shard of a sequence, while a block runs on it."""

    def __init__(self, group: dist.ProcessGroup, dim: int = 1) -> None:
        """`dim`: the dimension of hidden states that holds the positions."""
        self.group = group
        self.size = dist.get_world_size(group)
        self._at = dist.get_rank(group)
        self._length = 0  # outside of a block
        self.masks = SequenceMasks(self._at, dim)

    @contextmanager
    def running(self, length: int) -> Iterator[None]:
        """A scope in which a block of this many positions attends to those of all ranks."""
        before, self._length = self._length, length
        try:
            with _SharedAttention(self):
                yield
        finally:
            self._length = before

    def drawing(self, dropout_p: float, device: torch.device) -> AbstractContextManager[None]:
        """A scope for dropout of the attention weights of this shard's queries."""
        return self.masks.own(device) if dropout_p else nullcontext()

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self._at * length, length)

    def gather_output(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence, for computations that every rank repeats."""
        whole: torch.Tensor = _GatherSame.apply(part, dim, self.group)
        return whole

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """scaled_dot_product_attention of this rank's queries over the keys and values of all ranks."""
        with self.drawing(dropout_p if self._length == query.shape[-2] else 0.0, query.device):
            return self._attend(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        more: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if not self._length or query.shape[-2] != self._length:  # not along the sequence
            return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **more)
        if attn_mask is not None:
            attn_mask = self._rows(attn_mask)
        if key.shape[-2] != self._length:  # the keys of another sequence, which is not sharded
            return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **more)
        dtype = autocast_dtype(query)
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        key, value = (_GatherSum.apply(part, part.dim() - 2, self.group) for part in (key, value))
        if not is_causal:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, **more)
        seen = self._length * (self._at + 1)
        key, value = key.narrow(-2, 0, seen), value.narrow(-2, 0, seen)
        if self._at == 0:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **more)
        if _has_flash(query, key, value, dropout_p, enable_gqa):
            flash = flash_attention()  # causal from the last position backwards
            attended: torch.Tensor = flash(query, key, value, dropout_p, True, False, scale=scale)[0]
            return attended
        rows = torch.arange(seen - self._length, seen, device=query.device)
        mask = rows[:, None] >= torch.arange(seen, device=query.device)
        return F.scaled_dot_product_attention(query, key, value, mask, **more)

    def multihead_forward(self, attention: nn.MultiheadAttention, inner: str) -> Callable[..., Any]:
        """A forward for torch's own module, whose original forward is the attribute `inner`.

        The module checks its masks against its keys, so it gets the keys of all ranks.
        """
        signature = inspect.signature(attention.forward)

        def forward(attention: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            query, key, value = (given.arguments[name] for name in ("query", "key", "value"))
            dim = 1 if attention.batch_first and query.dim() == 3 else 0
            if not self._length or query.shape[dim] != self._length:
                return getattr(attention, inner)(*args, **kwargs)
            if key.shape[dim] == self._length:
                keys = _GatherSum.apply(key, dim, self.group)
                values = keys if value is key else _GatherSum.apply(value, dim, self.group)
                given.arguments.update(key=keys, value=values)
            mask = given.arguments.get("attn_mask")
            if mask is not None:
                given.arguments.update(attn_mask=self._rows(mask), is_causal=False)
            dropout_p = attention.dropout if attention.training else 0.0
            with self.running(0), self.drawing(dropout_p, query.device):
                return getattr(attention, inner)(*given.args, **given.kwargs)

        return forward

    def refusal(self, why: str) -> PlanError:
        return PlanError(
            f"context_parallel={self.size} does not fit this model: on a sharded sequence its result differs",
            why=f"{why}. Its blocks may count positions themselves, or attend without scaled_dot_product_attention",
            do="compute positions before the blocks and attend with torch's scaled_dot_product_attention "
            "(attn_implementation='sdpa'), or set context_parallel=1",
        )

    def _rows(self, mask: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's queries in a mask of queries by keys."""
        whole = self._length * self.size
        if mask.dim() < 2 or mask.shape[-2] == 1:
            return mask
        if mask.shape[-2] != whole:
            raise self.refusal(f"a mask in a block has {mask.shape[-2]} rows, for a sequence of {whole} positions")
        return self.of(mask, mask.dim() - 2)


class _SharedAttention(TorchFunctionMode):
    def __init__(self, part: SequencePart) -> None:
        super().__init__()
        self._part = part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._part.attend(*args, **(kwargs or {}))
        return self._part.masks.call(func, args, kwargs or {})


class _GatherSame(torch.autograd.Function):
    """All-gathers shards for a computation that every rank repeats: the gradient is the shard's, times the ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(part, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        size = dist.get_world_size(ctx.group)
        length = gradient.shape[ctx.dim] // size
        return gradient.narrow(ctx.dim, dist.get_rank(ctx.group) * length, length) * size, None, None


class _GatherSum(torch.autograd.Function):
    """All-gathers shards that every rank uses differently: the gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(part, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None, None


def _gather(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim)


def _has_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, enable_gqa: bool) -> bool:
    """Whether a kernel exists that needs no mask in memory for fewer queries than keys."""
    if q.device.type != "cuda" or q.dtype not in HALF or q.shape[-1] % 8 or q.dim() != 4:
        return False
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, dropout_p, False, enable_gqa)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
