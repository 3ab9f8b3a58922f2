"""How hooks on parameters and on an optimizer travel to the ranks: torch leaves both out of what it pickles.

They are carried beside the object's own description, as its state, so that a hook may refer to its own parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distributed.runtime.torch_module_compat import OPTIMIZER_HOOKS, gradient_hooks


def has_hooks(value: Any) -> bool:
    return bool(_hooks_of(value))


def describe(value: Any) -> tuple[Any, ...]:
    """What pickle's `reducer_override` returns: constructor, arguments, state, and a function that sets the state."""
    made, given, *own = value.__reduce_ex__(4)
    return made, given, (own[0] if own else None, _hooks_of(value)), None, None, _fill


def _hooks_of(value: Any) -> dict[str, Any]:
    if isinstance(value, nn.Parameter):
        found = zip(("before", "after"), gradient_hooks(value), strict=True)
        return {kind: list(hooks.values()) for kind, hooks in found if hooks}
    if isinstance(value, torch.optim.Optimizer):
        return {name: hooks for name in OPTIMIZER_HOOKS if (hooks := value.__dict__.get(name))}
    return {}


def _fill(value: Any, state: tuple[Any, dict[str, Any]]) -> None:
    own, hooks = state
    if isinstance(value, nn.Parameter):
        for hook in hooks.get("before", ()):
            value.register_hook(hook)
        for hook in hooks.get("after", ()):
            value.register_post_accumulate_grad_hook(hook)
    else:
        value.__setstate__(own)
        for name, found in hooks.items():
            getattr(value, name).update(found)
