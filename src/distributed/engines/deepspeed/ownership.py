"""Loan: what DeepSpeed does to a model and an optimizer that are the user's, and how they are given back.

It puts the parameters' values into buffers of its own, writes notes on parameters and modules, and has the optimizer
step other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distributed.strategies.in_parts import mark_parts
from distributed.strategies.optimizer_state import load_named_state


class Loan:
    """Made before DeepSpeed sees them."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._module, self._optimizer = module, optimizer
        self._notes = {id(owner): set(vars(owner)) for owner in (*module.modules(), *module.parameters())}
        self._made = {name: (parameter.dtype, parameter.device) for name, parameter in module.named_parameters()}
        self.groups = [] if optimizer is None else [(group, list(group["params"])) for group in optimizer.param_groups]
        self._earlier = {} if optimizer is None else dict(optimizer.state)
        self.engine: Any = None  # as soon as there is one
        self.values: Mapping[str, torch.Tensor] = {}  # what parameters are to have, if not what they compute with
        self.state: dict[str, Any] | None = None  # of the optimizer, by the parameters' names

    def begin(self) -> None:
        """The engine has taken over all that there was, which need not be kept twice."""
        self._earlier, self.values = {}, {}

    def take_back(self) -> None:
        if self._is_hollow():
            mark_parts(self._module)
        else:
            if self.engine is not None:
                self.engine.destroy()
                self.engine.module_forward_pre_hook.remove()
                self.engine.module_forward_post_hook.remove()
            self._take_model()
        self.engine = None
        if self._optimizer is not None:
            self._take_optimizer(self._optimizer)

    def _is_hollow(self) -> bool:
        """Whether there are parameters that are shared out, and nobody has brought them together."""
        shared_out = [name for name, parameter in self._module.named_parameters() if hasattr(parameter, "ds_tensor")]
        return bool(shared_out) and (self.engine is None or not self.values.keys() >= set(shared_out))

    def _take_model(self) -> None:
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                dtype, device = self._made[name]
                parameter.data = self.values.get(name, parameter.data).to(device, dtype, copy=True)
                parameter.grad = None
        for module in self._module.modules():
            module._parameters = dict(module._parameters)
        for owner in (*self._module.modules(), *self._module.parameters()):
            for note in set(vars(owner)) - self._notes.get(id(owner), set(vars(owner))):
                delattr(owner, note)

    def _take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.clear()
        optimizer.state.update(self._earlier)
        optimizer.param_groups[:] = [group for group, _ in self.groups]
        for group, parameters in self.groups:
            group["params"] = parameters
        if self.state is not None:
            load_named_state(optimizer, self._module, self.state)
