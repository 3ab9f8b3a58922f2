"""Compiled blocks: torch.compile of each block, not of the whole model, so that equal blocks share one compilation."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import nn

from distributed.runtime.torch_compat import inductor_options
from distributed.runtime.torch_module_compat import forget_compiled_call
from distributed.strategies.model.blocks import need_blocks
from distributed.strategies.model.recompute import forward_name, restore_forward, without_caches

_INNER = "_forward_to_compile"


def compile_blocks(
    module: nn.Module,
    blocks: Sequence[str] = (),
    mode: str | None = None,
    *,
    backend: str = "inductor",
    is_alike: bool = False,
) -> list[str]:
    """Compile each block in place, at its first call; returns the paths of the compiled blocks.

    `is_alike`: several ranks compute the same, and must come to the same bytes. Torch times kernels to choose among
    them, and those of two ranks may add in different orders.

    >>> compile_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    ['0', '1']
    """
    how: dict[str, Any] = {"mode": mode}
    if is_alike:  # torch takes a mode or options, not both
        how = {"options": (inductor_options(mode) if mode else {}) | {"deterministic": True}}
    paths = need_blocks(module, blocks, "compile", "compile")
    for path in paths:
        block = module.get_submodule(path)
        if forward_name(block) == "forward" and _INNER not in block.__dict__:
            setattr(block, _INNER, block.forward)
            block.forward = MethodType(_forward, block)  # type: ignore[method-assign]
        block.compile(backend=backend, **how)
    return paths


def undo_compile(module: nn.Module, paths: Sequence[str]) -> None:
    """Let these blocks run without compilation again."""
    for path in paths:
        block = module.get_submodule(path)
        forget_compiled_call(block)
        if _INNER in block.__dict__:
            restore_forward(block, forward_name(block), block.__dict__.pop(_INNER))


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Hide the layer index of caches, because a different number would recompile every block."""
    if self.training:
        args, kwargs = without_caches(args, kwargs)
    return getattr(self, _INNER)(*args, **kwargs)
