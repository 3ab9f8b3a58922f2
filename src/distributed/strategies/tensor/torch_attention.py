"""nn.MultiheadAttention with a share of the heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distributed.runtime.torch_module_compat import has_one_projection
from distributed.strategies.tensor.collectives import copy_to, gather_from, reduce_from
from distributed.strategies.tensor.region import Region


class TorchAttention:
    """The forward of an nn.MultiheadAttention that has a share of the heads."""

    def __init__(self, m: nn.MultiheadAttention, region: Region) -> None:
        self._module, self._region, self._is_one = m, region, has_one_projection(m)
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
        if dropout:
            region.stream.begin(query.device)
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(m.head_dim)
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        if dropout:
            region.stream.end(query.device)
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
        q, k, v = (next(new for old, new in inside if old is x) for x in (query, key, value))
        if self._is_one:
            weights: Sequence[torch.Tensor] = m.in_proj_weight.chunk(3)
        else:
            weights = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
        biases = (None, None, None) if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
        if query is key and key is value and self._is_one:
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
        """The mask that is added to the scores of this rank's heads, in a shape that broadcasts to theirs."""
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
