"""Recomputation (activation checkpointing): a block keeps its input, and runs again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distributed.core.errors import PlanError
from distributed.runtime.torch_compat import is_operator
from distributed.strategies.model.blocks import need_blocks

_INNER = "_forward_to_recompute"
_KIND = "_recompute_kind"
_MATMULS = ("mm", "addmm", "_scaled_mm")
_KEPT = (
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def recompute(module: nn.Module, kind: str, every: int = 1, blocks: Sequence[str] = ()) -> list[str]:
    """Recompute blocks in the backward pass, in place; returns the paths of those blocks.

    "full" keeps only the input of every n-th block. "selective" also keeps results that are costly to compute: those of
    attention and batched products, and of every second plain matrix product; all else is recomputed.

    >>> recompute(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), "full", every=2)
    ['0', '2']
    """
    if kind not in ("full", "selective"):
        raise PlanError(f"activation_checkpointing={kind!r} is not known", do="set 'full' or 'selective'")
    if every < 1:
        raise PlanError(
            f"activation_checkpointing={every}",
            why="a number means that every n-th block is recomputed",
            do="set activation_checkpointing=1 or more",
        )
    paths = need_blocks(module, blocks, "recompute", "activation_checkpointing")
    for path in paths[::every]:
        block = module.get_submodule(path)
        if _INNER not in block.__dict__:
            setattr(block, _INNER, block.forward)
            block.forward = MethodType(_forward, block)  # type: ignore[method-assign]
        setattr(block, _KIND, kind)
    return paths[::every]


def undo_recompute(module: nn.Module) -> None:
    """Restore the original forward of every block."""
    for block in module.modules():
        if _INNER in block.__dict__:
            restore_forward(block, "forward", block.__dict__.pop(_INNER))
            delattr(block, _KIND)


def forward_name(block: nn.Module) -> str:
    """The attribute of a block to patch, so that the patch also holds when the block runs again."""
    return _INNER if _INNER in block.__dict__ else "forward"


def restore_forward(block: nn.Module, name: str, before: Callable[..., Any]) -> None:
    """Restore a block's forward; if that is its class's, no attribute is left on the block."""
    is_of_class = getattr(before, "__func__", None) is type(block).forward
    if is_of_class and name == "forward":
        block.__dict__.pop(name, None)
    else:
        setattr(block, name, before)


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without a key-value cache, which a second run would fill twice; training does not read it."""
    args = tuple(None if _is_cache(value) else value for value in args)
    return args, {name: None if _is_cache(value) else value for name, value in kwargs.items()}


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    inner: Callable[..., Any] = getattr(self, _INNER)
    if not (self.training and torch.is_grad_enabled()):
        return inner(*args, **kwargs)
    args, kwargs = without_caches(args, kwargs)
    is_full = getattr(self, _KIND) == "full"
    if not torch.compiler.is_compiling() and next(self.buffers(), None) is not None:
        return checkpoint(
            inner, *args, use_reentrant=False, context_fn=partial(_contexts, _Buffers(self), is_full), **kwargs
        )
    if is_full:
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)
    return checkpoint(inner, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)


class _Buffers:
    """A block's buffers at its first run: the second run uses these values, and changes none."""

    def __init__(self, block: nn.Module) -> None:
        self._places = [
            (module._buffers, name, buffer.detach().clone())
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @contextmanager
    def lent(self) -> Iterator[None]:
        now = [owner[name] for owner, name, _ in self._places]
        for owner, name, first in self._places:
            owner[name] = first
        try:
            yield
        finally:
            for (owner, name, _), buffer in zip(self._places, now, strict=True):
                owner[name] = buffer


def _contexts(buffers: _Buffers, is_full: bool) -> tuple[Any, Any]:
    first, again = (nullcontext(), nullcontext()) if is_full else _selective_contexts()
    return first, _both(buffers.lent(), again)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def _selective_contexts() -> tuple[Any, Any]:
    """The dispatch modes of a block's two runs; each counts matrix products, so that both keep the same ones."""
    return create_selective_checkpoint_contexts(partial(_policy, {False: 0, True: 0}))


def _policy(seen: dict[bool, int], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition("::")[2].partition(".")[0] if is_operator(op) else ""
    if name in _MATMULS:
        seen[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
