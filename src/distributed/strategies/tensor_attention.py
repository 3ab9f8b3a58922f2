"""Attention with a share of the heads: nn.MultiheadAttention, and modules that count their heads in attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call

from distributed.core.errors import PlanError
from distributed.strategies.layout import Cut
from distributed.strategies.tensor_collectives import (
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    scatter_sequence,
    scatter_to,
)
from distributed.strategies.tensor_modules import HEAD_SIZES, Heads

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")  # which a trial must not write to
_SHAPE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


class Region:
    """What the layers of one module share: an input that is copied or gathered once, and outputs that are summed."""

    def __init__(self, group: dist.ProcessGroup, sequence_dim: int | None, readers: int) -> None:
        self.group = group
        self.sequence_dim = sequence_dim  # where activations outside of the region are shards of a sequence
        self.is_whole = False  # layers have all of their parameters, for once
        self.is_gathered = False  # their input was already gathered
        self.stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._readers = readers
        self._left = 0
        self._last: tuple[torch.Tensor, torch.Tensor, bool] | None = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_whole:
            return x
        for stand_in, real in self.stand_ins:
            if x is stand_in:
                return real
        if self.is_gathered:
            return x
        last = self._last
        if last is None or last[0] is not x or last[2] != torch.is_grad_enabled():
            last = (x, self.take(x), torch.is_grad_enabled())
            self._left = self._readers
        self._left -= 1
        self._last = last if self._left else None
        return last[1]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_dim is None:
            return copy_to(x, self.group)
        if x.dim() < 3:
            raise PlanError(
                f"a layer in a block whose sequences are shared out got a tensor of shape {tuple(x.shape)}",
                why="the sequence, which is to be gathered, is not a dimension of its own",
                do="keep (batch, sequence, width) in the blocks, or leave sequence_parallel out",
            )
        return gather_sequence(x, self.sequence_dim, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_whole:
            return x
        if self.sequence_dim is None:
            return reduce_from(x, self.group)
        return scatter_sequence(x, self.sequence_dim, self.group)


@dataclass(frozen=True)
class _Manner:
    """How a module is made to work with its share of the heads."""

    narrows: bool  # it is shown an input as narrow as its share, in place of which its layers take the real one
    shares_sizes: bool  # attributes that are widths, too, become those of the share


class HeadShare:
    """The forward of a module that has a share of the heads.

    How a user's module comes to its sizes is not known: from attributes, or from its input's shape. So at the first
    call the ways are tried with random weights, and the one is taken that gives what the whole module gives.
    """

    def __init__(
        self,
        path: str,
        m: nn.Module,
        heads: Heads,
        width: int,
        region: Region,
        cuts: Mapping[str, tuple[tuple[int, ...], Cut]],
        has_output: bool,
        settled: dict[Any, _Manner],
    ) -> None:
        self._path, self._module, self._width, self._region = path, m, width, region
        self._cuts = cuts  # of its parameters: the whole shape, and what is here
        self._settled = settled  # by the modules before
        self._forward: Callable[..., Any] = m.forward
        self._degree = dist.get_world_size(region.group)
        self._whole = {name: value for name, value in vars(m).items() if type(value) is int}
        self._counts = _shares(self._whole, heads, self._degree)
        self._sizes = _size_shares(self._whole, heads, self._degree, set(self._counts))
        self._key = (type(m), heads, tuple(self._counts.items()), tuple(self._sizes.items()))
        self._manner: _Manner | None = None
        if not has_output:  # it is a layer of another module, and there is nothing to compare
            self._settle_on(_Manner(narrows=False, shares_sizes=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._region.is_whole:
            return self._forward(*args, **kwargs)
        if self._manner is None:
            self._settle(args, kwargs)
            assert self._manner is not None
        return self._run(self._manner.narrows, args, kwargs)

    def _run(self, narrows: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self._region
        if not narrows and region.sequence_dim is None:
            return self._forward(*args, **kwargs)
        found = self._activations(args, kwargs)
        if not found and region.sequence_dim is not None:
            raise PlanError(
                f"{self._path} ({type(self._module).__name__}) cannot run on shards of a sequence",
                why=f"none of its arguments is a tensor of width {self._width}, which could be gathered",
                do="leave sequence_parallel out",
            )
        swaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        for at, x in enumerate(found):
            real = region.take(x) if at == 0 else copy_to(x, region.group)
            if narrows:
                shape = (*real.shape[:-1], real.shape[-1] // self._degree)
                stand_in = real.new_full((), math.nan).expand(shape)  # whoever reads it is found out
                region.stand_ins.append((stand_in, real))
                swaps.append((x, stand_in))
            else:
                swaps.append((x, real))
        region.is_gathered = not narrows
        try:
            return self._forward(
                *(_swapped(value, swaps) for value in args),
                **{name: _swapped(value, swaps) for name, value in kwargs.items()},
            )
        finally:
            region.is_gathered = False
            region.stand_ins.clear()

    def _activations(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()):
            is_wide = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == self._width
            if is_wide and value.is_floating_point() and not any(value is other for other in found):
                found.append(value)
        return found

    def _settle_on(self, manner: _Manner) -> None:
        self._manner = manner
        self._set(self._counts | (self._sizes if manner.shares_sizes else {}))

    def _set(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            setattr(self._module, name, value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _settle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._key not in self._settled:
            with torch.no_grad(), _evaluating(self._module):
                uncached = {name: None if name in _CACHES else value for name, value in kwargs.items()}
                self._settled[self._key] = self._find_manner(args, uncached)
        self._settle_on(self._settled[self._key])

    def _find_manner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Manner:
        here = dict(self._module.named_parameters())
        whole = {name: _random(shape, here[name]) for name, (shape, _) in self._cuts.items()}
        share = {name: cut.take(whole[name]) for name, (_, cut) in self._cuts.items()}
        expected = self._whole_result(whole, args, kwargs)
        reason = "the results differ"
        is_generic = type(self._module).__module__.startswith("transformers.")  # which ask attributes only
        for narrows in (False, True) if is_generic else (True, False):
            for shares_sizes in (True, False) if self._sizes else (True,):
                self._set(self._counts | (self._sizes if shares_sizes else {}))
                try:
                    with _stand_in_parameters(self._module, share):
                        result = _first(self._run(narrows, args, kwargs))
                    if self._agree(result, expected):
                        return _Manner(narrows, shares_sizes)
                except _SHAPE_ERRORS as error:
                    reason = str(error).splitlines()[0]
                finally:
                    self._set(self._whole)
        raise PlanError(
            f"{self._path} ({type(self._module).__name__}) does not compute the same with its share of the heads",
            why=f"its forward has sizes or an order of the heads that are not recognised; at the last try: {reason}",
            do="take sizes from attributes such as self.num_heads and self.head_dim, or give tensor_parallel_plan with "
            "another style ('column' where one layer has query, key and value of each head next to each other)",
        )

    def _whole_result(self, whole: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self._region
        dim = region.sequence_dim
        if dim is not None:
            swaps = [(x, gather_from(x, dim, region.group)) for x in self._activations(args, kwargs)[:1]]
            args = tuple(_swapped(value, swaps) for value in args)
            kwargs = {name: _swapped(value, swaps) for name, value in kwargs.items()}
        region.is_whole = True
        try:
            result = _first(functional_call(self._module, whole, args, kwargs))
        finally:
            region.is_whole = False
        return result if dim is None else scatter_to(result, dim, region.group)

    def _agree(self, result: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether they are the same, on every rank."""
        if result.shape != expected.shape:
            return False
        if isinstance(result, FakeTensor) or result.is_meta:
            return True
        tolerance = 1e-2 if result.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled() else 1e-1
        error = (result - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
        verdict = (error < tolerance).float()  # NaN is not
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=self._region.group)
        return bool(verdict.item())


def _shares(values: Mapping[str, int], heads: Heads, degree: int) -> dict[str, int]:
    """The attributes that count heads, with the numbers of a share."""
    named = {name: value for name, value in values.items() if "head" in name or name == "h"}
    counts = (heads.queries, heads.keys)
    return {name: value // degree for name, value in named.items() if value in counts and name not in HEAD_SIZES}


def _size_shares(values: Mapping[str, int], heads: Heads, degree: int, counts: set[str]) -> dict[str, int]:
    sizes = {*heads.parts, sum(heads.parts)}
    others = {name: value for name, value in values.items() if name not in counts and name not in HEAD_SIZES}
    return {name: value // degree for name, value in others.items() if value in sizes}


def _swapped(value: Any, swaps: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    for old, new in swaps:
        if value is old:
            return new
    return value


def _first(output: Any) -> torch.Tensor:
    found = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"an attention gives a tensor, not a {type(found).__name__}")
    return found


def _random(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """The same on every rank, and no matter what the weights are: they may be zero at first."""
    generator = torch.Generator(like.device if like.device.type == "cuda" else "cpu").manual_seed(len(shape))
    if isinstance(like, FakeTensor) or like.is_meta:
        return like.new_empty(shape)
    numbers = torch.randn(shape, generator=generator, device=generator.device) / math.sqrt(shape[-1])
    return numbers.to(like)


@contextmanager
def _stand_in_parameters(m: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Parameters with other values for a while."""
    own = dict(m.named_parameters())
    kept: list[tuple[nn.Module, str, nn.Parameter]] = []
    for name, value in values.items():
        holder, _, leaf = name.rpartition(".")
        owner = m.get_submodule(holder)
        kept.append((owner, leaf, own[name]))
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for owner, leaf, parameter in kept:
            owner._parameters[leaf] = parameter


@contextmanager
def _evaluating(m: nn.Module) -> Iterator[None]:
    """Without dropout for a while."""
    modes = [(child, child.training) for child in m.modules()]
    m.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


class TorchAttention:
    """The forward of an nn.MultiheadAttention that has a share of the heads."""

    def __init__(self, m: nn.MultiheadAttention, region: Region) -> None:
        self._module, self._region = m, region
        self._degree, self._rank = dist.get_world_size(region.group), dist.get_rank(region.group)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        m, region = self._module, self._region
        is_batched = query.dim() == 3
        q, k, v = self._project(query, key, value)
        if not is_batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not m.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        q, k, v = (t.unflatten(-1, (-1, m.head_dim)).transpose(1, 2) for t in (q, k, v))
        mask = self._mask(q, k, attn_mask, key_padding_mask, is_causal and not need_weights)
        causal = is_causal and mask is None
        dropout = m.dropout if m.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(m.head_dim)
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        mixed = mixed.transpose(1, 2).flatten(2)
        if not is_batched:
            mixed = mixed.squeeze(0)
        elif not m.batch_first:
            mixed = mixed.transpose(0, 1)
        output = region.leave(F.linear(mixed, m.out_proj.weight))
        if m.out_proj.bias is not None:
            output = output + m.out_proj.bias.to(output.dtype)
        return output, self._all_weights(weights, average_attn_weights, is_batched)

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m, region = self._module, self._region
        inside = [(query, region.take(query))]
        for x in (key, value):
            if not any(x is other for other, _ in inside):
                inside.append((x, copy_to(x, region.group)))
        q, k, v = (_swapped(x, inside) for x in (query, key, value))
        if m._qkv_same_embed_dim:
            weights: Sequence[torch.Tensor] = m.in_proj_weight.chunk(3)
        else:
            weights = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
        biases = (None, None, None) if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
        if query is key and key is value and m._qkv_same_embed_dim:
            return F.linear(q, m.in_proj_weight, m.in_proj_bias).chunk(3, -1)  # type: ignore[return-value]
        return (
            F.linear(q, weights[0], biases[0]),
            F.linear(k, weights[1], biases[1]),
            F.linear(v, weights[2], biases[2]),
        )

    def _mask(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        mask: torch.Tensor | None,
        padding: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor | None:
        """What is added to the scores of this rank's heads, in a shape that widens to theirs."""
        if is_causal and padding is None:
            return None
        if mask is None and is_causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        total = None if mask is None else _additive(mask, q)
        if total is not None and total.dim() == 3:  # of every head of every sample
            total = total.unflatten(0, (q.shape[0], -1)).chunk(self._degree, 1)[self._rank]
        if padding is None:
            return total
        added = _additive(padding, q)[:, None, None, :]
        return added if total is None else total + added

    def _all_weights(self, weights: torch.Tensor | None, average: bool, is_batched: bool) -> torch.Tensor | None:
        if weights is None:
            return None
        group = self._region.group
        weights = reduce_from(weights.mean(1) / self._degree, group) if average else gather_from(weights, 1, group)
        return weights if is_batched else weights.squeeze(0)


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    return mask.to(like.dtype)
