"""TaskModules: what a task has beside its model: a loss with tensors of its own, and modules of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distributed.train.loss.state import LossState, holder_of, load_loss, state_of


class TaskModules:
    """The part of a task that goes to its device, and that a checkpoint keeps of its loss."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None

    def own_attributes(self) -> dict[str, Any]:
        """What a subclass of the user's has put into the task."""
        raise NotImplementedError

    def modules_beside(self) -> dict[str, nn.Module]:
        """Modules that are no part of the model and are not trained, by attribute: a teacher, say."""
        own = {id(module) for module in self.model.modules()}
        found = {name: value for name, value in self.own_attributes().items() if isinstance(value, nn.Module)}
        return {name: module for name, module in found.items() if id(module) not in own}

    def move_to(self, device: torch.device) -> None:
        """The model, if it is made, and all modules beside it."""
        if not any(p.is_meta for p in self.model.parameters()):
            self.model.to(device)
        self.move_loss_to(device)

    def move_loss_to(self, device: torch.device) -> None:
        """A loss that has tensors of its own (class weights), and modules of the task."""
        if self.loss_module is not None:
            self.loss_module.to(device)
        for module in self.modules_beside().values():
            module.to(device)

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, where it is a module and no part of the model."""
        holder = holder_of(self.loss_fn, self.model)
        return holder if isinstance(holder, nn.Module) else None

    def loss_state(self) -> dict[str, Any]:
        """What the loss has, by name: its `state_dict()` without what is the model's; {}: nothing."""
        holder = holder_of(self.loss_fn, self.model)
        return {} if holder is None else state_of(holder, self.model)

    def watch_loss(self) -> LossState:
        return LossState(holder_of(self.loss_fn, self.model), self.model)

    def load_loss_state(self, state: dict[str, Any]) -> None:
        holder = holder_of(self.loss_fn, self.model)
        if holder is not None:
            load_loss(holder, state)
