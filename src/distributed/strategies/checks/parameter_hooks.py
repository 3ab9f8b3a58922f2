"""A user's hooks on the gradients of parameters: called with the gradient of the whole batch, as in one process.

If gradients are reduced over ranks, a hook that autograd calls gets the gradient of one rank's share. Its result (a
clamp, a sign, a norm) then differs from that for the whole batch, unless it is linear, which cannot be known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.runtime.torch_module_compat import Hooks, gradient_hooks, has_gradient_hooks, set_gradient_hooks


class _Hooked(NamedTuple):
    parameter: nn.Parameter
    before: Hooks | None  # of register_hook
    after: Hooks | None  # of register_post_accumulate_grad_hook


class ParameterHooks:
    """Removes the hooks from the parameters, and calls them once the gradients are reduced, until `close`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._hooked = [_Hooked(p, *gradient_hooks(p)) for p in self._parameters if has_gradient_hooks(p)]
        for hooked in self._hooked:
            set_gradient_hooks(hooked.parameter, None, OrderedDict())

    @torch.no_grad()
    def call(self) -> None:
        """Call the hooks as autograd would for the reduced gradients."""
        for parameter, before, after in self._hooked:
            if parameter.grad is None:
                continue
            for hook in list((before or {}).values()):
                changed = hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed
            for hook in list((after or {}).values()):
                hook(parameter)

    def close(self) -> None:
        for parameter, before, after in self._hooked:
            set_gradient_hooks(parameter, before, after)


def hooked_parameters(module: nn.Module) -> list[str]:
    """The names of trained parameters with a hook on their gradient."""
    return [name for name, p in module.named_parameters() if p.requires_grad and has_gradient_hooks(p)]


def refuse_hooks(module: nn.Module, setting: str) -> None:
    """Raise if a parameter has a hook, where one process would call it with each backward pass."""
    if names := hooked_parameters(module):
        raise TaskError(
            f"{names[0]} has a hook on its gradient, with {setting}",
            why="one process calls the hook in each backward pass, and ranks reduce their gradients when they step",
            do="let the model's forward do what the hook does (a mask: on the weight)",
        )


def refuse_new_hooks(module: nn.Module) -> None:
    """Raise if a forward pass has put a hook on a parameter, where gradients are then reduced over ranks."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and gradient_hooks(parameter)[0]:
            raise TaskError(
                f"a hook on the gradient of {name} was registered during training",
                why="the hook is called with the gradient of one rank's share of the batch, before the all-reduce",
                do="register the hook before fit: it is then called with the gradient of the whole batch",
            )
