"""BorrowedModel: what DeepSpeed does to a model and an optimizer that are the user's, and how they are given back.

It puts the parameters' values into buffers of its own, writes notes on parameters and modules, and has the optimizer
step other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distributed.strategies.checks.sharded_models import mark_parts
from distributed.strategies.model.optimizer_state import load_named_state


class BorrowedModel:
    """Made before DeepSpeed sees them."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._module, self._optimizer = module, optimizer
        self._notes = {id(owner): set(vars(owner)) for owner in (*module.modules(), *module.parameters())}
        self._made = {name: (parameter.dtype, parameter.device) for name, parameter in module.named_parameters()}
        self.groups = [] if optimizer is None else [(group, list(group["params"])) for group in optimizer.param_groups]
        self._earlier = {} if optimizer is None else dict(optimizer.state)
        self._engine: Any = None  # as soon as there is one
        self._values: Mapping[str, torch.Tensor] = {}  # what parameters are to have, if not what they compute with
        self._state: dict[str, Any] | None = None  # of the optimizer, by the parameters' names

    def lend_to(self, engine: Any) -> None:
        """What is made for them, and ended when they are taken back."""
        self._engine = engine

    def begin(self) -> None:
        """The engine has taken over all that there was, which need not be kept twice."""
        self._earlier, self._values = {}, {}

    def return_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """What parameters are to have when they are taken back, by their names."""
        self._values = values

    def return_state(self, state: dict[str, Any]) -> None:
        """What the optimizer is to have when it is taken back, by the parameters' names."""
        self._state = state

    def take_back(self) -> None:
        if self._is_hollow():
            mark_parts(self._module)
        else:
            if self._engine is not None:
                self._engine.destroy()
                self._engine.module_forward_pre_hook.remove()
                self._engine.module_forward_post_hook.remove()
            self._take_model()
        self._engine = None
        if self._optimizer is not None:
            self._take_optimizer(self._optimizer)

    def _is_hollow(self) -> bool:
        """Whether there are sharded parameters that were not gathered."""
        shared_out = [name for name, parameter in self._module.named_parameters() if hasattr(parameter, "ds_tensor")]
        return bool(shared_out) and (self._engine is None or not self._values.keys() >= set(shared_out))

    def _take_model(self) -> None:
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                dtype, device = self._made[name]
                parameter.data = self._values.get(name, parameter.data).to(device, dtype, copy=True)
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
        if self._state is not None:
            load_named_state(optimizer, self._module, self._state)
