"""Forwards, with collectives, of modules with cut parameters or on shards of a sequence.

Each is called through one function for all modules: code that was compiled for a block then serves all equal blocks,
which a function of each module's own would not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distributed.core.errors import PlanError
from distributed.strategies.model.random_streams import RankStream
from distributed.strategies.model.sequence_masks import MaskMode, SequenceMasks
from distributed.strategies.tensor.collectives import copy_to, gather_from, reduce_from, scatter_to
from distributed.strategies.tensor.modules import core_of, is_lora, is_transposed
from distributed.strategies.tensor.region import Region

_PATCH = "_tensor_parallel_forward"


def patch(m: nn.Module, forward: Callable[..., Any], *, compiles: bool) -> None:
    """Replace a module's forward. `compiles`: whether it may become part of a compiled block; collectives may not."""
    assert _PATCH not in m.__dict__
    setattr(m, _PATCH, forward)
    m.forward = MethodType(_call if compiles else _call_uncompiled, m)  # type: ignore[method-assign]


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, _PATCH)(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call_uncompiled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, _PATCH)(*args, **kwargs)


def install_column(m: nn.Module, region: Region) -> None:
    forward = _forward_of(m, with_bias=True)
    drops_input = is_lora(m)  # each rank has the whole input

    def column(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not m.training:
            return forward(region.enter(x), *args, **kwargs)
        if drops_input:
            region.stream.end(x.device)
        output = forward(region.enter(x), *args, **kwargs)
        region.stream.begin(x.device)
        return output

    patch(m, column, compiles=False)


def install_row(m: nn.Module, region: Region) -> None:
    core = core_of(m)
    assert core is not None
    forward = _forward_of(m, with_bias=False)  # it is added once, to the sum

    def row(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        part = forward(x, *args, **kwargs)
        region.stream.end(x.device)
        total = region.leave(part)
        bias: Any = core.bias
        return total if bias is None else total + bias.to(total.dtype)

    patch(m, row, compiles=False)


def install_gathered(m: nn.Module, group: dist.ProcessGroup) -> None:
    forward = _forward_of(m, with_bias=True)

    def column(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return gather_from(forward(copy_to(x, group), *args, **kwargs), -1, group)

    patch(m, column, compiles=False)


def _forward_of(m: nn.Module, *, with_bias: bool) -> Callable[..., Any]:
    """The forward of a linear layer, or of a LoRA layer around it, with the sizes of its cut weights."""
    core = core_of(m)
    assert core is not None
    is_turned = is_transposed(core)
    if with_bias and not is_turned:
        return m.forward

    def multiply(x: torch.Tensor) -> torch.Tensor:
        weight: Any = core.weight
        bias: Any = core.bias
        return F.linear(x, weight.t() if is_turned else weight, bias if with_bias else None)

    if core is m:
        return multiply
    core.forward = multiply  # type: ignore[method-assign]
    return m.forward


def install_vocabulary(m: nn.Module, group: dist.ProcessGroup) -> None:
    assert isinstance(m, nn.Embedding)
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    rows = m.num_embeddings // (last + 1)
    padding = None if m.padding_idx is None or m.padding_idx // rows != rank else m.padding_idx % rows

    def embed(ids: torch.Tensor) -> torch.Tensor:
        here = ids - rank * rows
        # an index that no rank has is out of range on the first or the last
        elsewhere = ((here < 0) & (rank > 0)) | ((here >= rows) & (rank < last))
        found = F.embedding(here.masked_fill(elsewhere, 0), m.weight, padding)
        return reduce_from(found.masked_fill(elsewhere.unsqueeze(-1), 0), group)

    patch(m, embed, compiles=False)


def install_entry(block: nn.Module, dim: int, group: dist.ProcessGroup) -> None:
    """Let the first block of a stack take this rank's shard of the sequence."""
    forward: Callable[..., Any] = block.forward
    degree = dist.get_world_size(group)

    def enter(*args: Any, **kwargs: Any) -> Any:
        whole = _hidden_in((*args, *kwargs.values()))
        if whole is None:
            raise PlanError(
                f"the first block ({type(block).__name__}) has no sequence to shard",
                why="none of its arguments is a tensor of at least three dimensions",
                do="leave sequence_parallel out",
            )
        if whole.shape[dim] % degree:
            raise PlanError(
                f"a sequence of {whole.shape[dim]} does not divide by a tensor-parallel degree of {degree}",
                why="with sequence_parallel all ranks have equal shards of the sequence",
                do=f"pad sequences to a multiple of {degree}, or leave sequence_parallel out",
            )
        shard = scatter_to(whole, dim, group)
        return forward(
            *(shard if x is whole else x for x in args),
            **{name: shard if x is whole else x for name, x in kwargs.items()},
        )

    block.forward = enter  # type: ignore[method-assign]


def install_masks(block: nn.Module, masks: SequenceMasks, stream: RankStream) -> None:
    """Random numbers of a block: those along its shard, and all within a cut width, are this rank's own."""
    forward: Callable[..., Any] = block.forward

    def draw(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_in((*args, *kwargs.values()))
        if not block.training or hidden is None:
            return forward(*args, **kwargs)
        with masks.running(hidden, stream), MaskMode(masks):
            return forward(*args, **kwargs)

    block.forward = draw  # type: ignore[method-assign]


def _hidden_in(values: Iterable[Any]) -> torch.Tensor | None:
    """The first argument that can be a sequence."""
    found = (x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 2)
    return next(found, None)


def install_exit(block: nn.Module, dim: int, group: dist.ProcessGroup) -> None:
    """Let the last block of a stack return the whole sequence."""
    forward: Callable[..., Any] = block.forward

    def leave(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (gather_from(output[0], dim, group), *output[1:])
        return gather_from(output, dim, group)

    block.forward = leave  # type: ignore[method-assign]
