"""Compilation: of each block, not of the whole model, so that equal blocks share one; and its results for later runs.

torch's compiler finds valid code by a hash of the graph, its settings, the versions and the device. It writes files
atomically, so ranks may share one folder, and a restarted rank does not compile again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from distributed.core.env import environ_with, inherited_environ, user_cache
from distributed.core.plan import Plan
from distributed.runtime.torch_compat import default_compile_cache, inductor_options
from distributed.runtime.torch_module_compat import forget_compiled_call
from distributed.strategies.model.blocks import need_blocks
from distributed.strategies.model.recompute import forward_name, restore_forward, without_caches

_INNER = "_forward_to_compile"
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


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


def compile_folder(plan: Plan, environ: Mapping[str, str]) -> Path:
    """The cache folder of the plan or the user, with one sub-folder for each version of torch."""
    base = (
        Path(plan.memory.compile_cache).expanduser() if plan.memory.compile_cache else user_cache(environ) / "compile"
    )
    return base.absolute() / f"torch-{torch.__version__}"


@contextmanager
def compile_cache(plan: Plan) -> Iterator[None]:
    """A scope in which compiled code is cached. A folder that the user set in the environment is kept."""
    if not plan.memory.compile or _is_the_users(inherited_environ()):
        yield
        return
    folder = compile_folder(plan, inherited_environ())
    folder.mkdir(parents=True, exist_ok=True)
    with environ_with({_FOLDER: str(folder)}):
        yield


def _is_the_users(environ: Mapping[str, str]) -> bool:
    """Whether the folder in the environment is the user's; torch writes its own default there too."""
    given = environ.get(_FOLDER)
    if not given:
        return False
    return Path(given) != Path(default_compile_cache())
