"""What a step of the user's own computes of parameters by itself, outside of any layer's forward.

Where ranks hold parts of a model, its layers know how to compute with a part. Code between them (a penalty on weights,
a method that is no forward) would take the part for the whole, mostly without an error. So the first steps are watched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from distributed.core.errors import TaskError
from distributed.runtime.torch_compat import tree_leaves

_CALLS = 2  # that are watched, of each kind of step
_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__")  # numbers, and return no tensor
Missing = Callable[[torch.Tensor], bool]


class OwnUse:
    """Watches the first calls of each step. `is_part`: whether this rank has only a part of a parameter, or none.

    `calls_once`: whether a step may call the model only once.
    """

    def __init__(self, module: nn.Module, is_part: Missing, setting: str, *, calls_once: bool = False) -> None:
        self._module, self._is_part, self._setting, self._calls_once = module, is_part, setting, calls_once
        self._left: dict[str, int] = {}

    @contextmanager
    def watching(self, step: str) -> Iterator[None]:
        """Around a call of the user's step of this name; it raises where that uses a part for the whole."""
        left = self._left.setdefault(step, _CALLS)
        if not left:
            yield
            return
        self._left[step] = left - 1
        watch = _Watch(self._module, self._is_part, self._setting, calls_once=self._calls_once)
        hooks = [
            register_module_forward_pre_hook(watch.enter),
            register_module_forward_hook(watch.leave, always_call=True),
        ]
        try:
            with watch:
                yield
        finally:
            for hook in hooks:
                hook.remove()


class _Watch(TorchFunctionMode):
    """Sees every function of torch that is called, and whether a forward of the model's layers is running."""

    def __init__(self, module: nn.Module, is_part: Missing, setting: str, *, calls_once: bool) -> None:
        super().__init__()
        self._module, self._layers = module, set(module.modules())
        self._names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
        self._is_part, self._setting = is_part, setting
        self._depth, self._calls_left = 0, 1 if calls_once else math.inf

    def enter(self, layer: nn.Module, given: Any) -> None:
        self._depth += layer in self._layers
        if layer is not self._module:
            return
        self._calls_left -= 1
        if self._calls_left < 0:
            raise TaskError(
                f"the step calls the model twice, with {self._setting}",
                why="its stages pass on the hidden states of one call for each micro-batch",
                do="let one call of the model compute both, or leave pipeline_parallel out",
            )

    def leave(self, layer: nn.Module, given: Any, output: Any) -> None:
        self._depth -= layer in self._layers

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return function(*args, **kwargs)
        given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        parts = [leaf for leaf in given.values() if leaf.is_meta or (id(leaf) in self._names and self._is_part(leaf))]
        if not parts:
            return function(*args, **kwargs)
        refusal = self._refusal(self._names.get(id(parts[0]), "a parameter of other ranks"))
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as failed:
            raise refusal from failed
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and id(leaf) not in given]
        if made or getattr(function, "__name__", "") in _READS:  # others ask for shapes and types
            raise refusal
        return result

    def _refusal(self, name: str) -> TaskError:
        return TaskError(
            f"the step computes with {name} outside of a forward of the model's layers, with {self._setting}",
            why="this rank has a part of it, and would take that for the whole",
            do="let the model's forward compute it and return it beside its outputs; or train with whole parameters "
            "on every rank: backend='pytorch-ddp', and zero_stage=1 for the optimizer state",
        )
