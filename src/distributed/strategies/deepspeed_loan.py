"""Loan: what DeepSpeed does to a model and an optimizer that are the user's, and how they are given back.

It puts the parameters' values into buffers of its own, writes notes on parameters and modules, and has the optimizer
step other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distributed.strategies.optimizer_state import load_named_state


class Loan:
    """Made before DeepSpeed sees them."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._module, self._optimizer = module, optimizer
        self._notes = {id(owner): set(vars(owner)) for owner in (*module.modules(), *module.parameters())}
        self._dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
        own = [] if optimizer is None else optimizer.param_groups
        self.groups = [(group, list(group["params"])) for group in own]

    def take_back(self, engine: Any, tree: Mapping[str, Any] | None) -> None:
        """With the values of `tree`, which is whole, or those that the model computes with."""
        engine.destroy()
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        values = {} if tree is None else tree["model"]
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.data = values.get(name, parameter.data).to(self._dtypes[name], copy=True)
                parameter.grad = None
        for module in self._module.modules():
            module._parameters = dict(module._parameters)
        for owner in (*self._module.modules(), *self._module.parameters()):
            for note in set(vars(owner)) - self._notes.get(id(owner), set(vars(owner))):
                delattr(owner, note)
        if self._optimizer is not None:
            self._take_optimizer(self._optimizer, None if tree is None else tree["optimizer"])

    def _take_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any] | None) -> None:
        optimizer.state.clear()
        optimizer.param_groups[:] = [group for group, _ in self.groups]
        for group, parameters in self.groups:
            group["params"] = parameters
        if state is not None:
            load_named_state(optimizer, self._module, state)
