"""The state of a loss: of a module with buffers or parameters, or of anything with state_dict and load_state_dict."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from distributed.core.errors import CheckpointError, TaskError, first_of
from distributed.train.checks.changed import Begun
from distributed.train.checks.digest import digest
from distributed.train.resume.survivor_state import take_model

_READ = 1 << 20  # elements of a buffer whose values are compared
_OPTIONS = (bool, int, float, str, type(None))


def holder_of(loss_fn: Any, model: nn.Module) -> Any:
    """What of a loss keeps a state. None: nothing does, or the model itself, which has it already.

    >>> holder_of(functools.partial(nn.MSELoss(), reduction="sum"), nn.Linear(1, 1))
    MSELoss()
    """
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    found = getattr(loss_fn, "__self__", loss_fn)  # of a bound method
    if not callable(getattr(found, "state_dict", None)) or not callable(getattr(found, "load_state_dict", None)):
        return None
    return None if any(found is module for module in model.modules()) else found


def loss_name(loss_fn: Any) -> str:
    """By which a loss is known again; "": none was passed.

    >>> loss_name(nn.MSELoss()), loss_name(nn.functional.mse_loss), loss_name(None)
    ('MSELoss', 'mse_loss', '')
    """
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if loss_fn is None:
        return ""
    return str(getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)).rpartition(".")[2]


def loss_options(loss_fn: Any) -> dict[str, Any]:
    """The plain values that a loss was made with.

    >>> loss_options(nn.SmoothL1Loss(beta=0.5))
    {'reduction': 'mean', 'beta': 0.5}
    """
    given: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial):
        given, loss_fn = loss_fn.keywords | given, loss_fn.func
    found = getattr(loss_fn, "__dict__", {}) | given
    public = {name: value for name, value in found.items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in public.items() if isinstance(value, _OPTIONS)}


def state_of(holder: Any, model: nn.Module) -> dict[str, Any]:
    """By name; without what is the model's, where the loss has a part of it."""
    if not isinstance(holder, nn.Module):
        return dict(holder.state_dict())
    shared = _of_model(holder, model)
    return {name: value for name, value in holder.state_dict(keep_vars=True).items() if name not in shared}


class LossState:
    """What a loss has changed since the run began; its class weights, say, are what it was made with.

    Made when the loss is on its device.
    """

    def __init__(self, holder: Any, model: nn.Module) -> None:
        self._holder, self._model = holder, model
        self._begun = Begun(_tensors(self._whole()))

    def changed(self) -> dict[str, Any]:
        whole = self._whole()
        changed = self._begun.changed(_tensors(whole))
        others = {name: value for name, value in whole.items() if not isinstance(value, torch.Tensor)}
        return others | {name: tensor.detach() for name, tensor in changed.items()}

    def take(self, saved: dict[str, Any]) -> None:
        self._begun.take(saved)
        if self._holder is not None:
            load_loss(self._holder, saved)

    def _whole(self) -> dict[str, Any]:
        return {} if self._holder is None else state_of(self._holder, self._model)


def load_loss(holder: Any, state: dict[str, Any]) -> None:
    """What had changed as it was saved, also into a loss that had not made all of its buffers yet."""
    try:
        if isinstance(holder, nn.Module):
            take_model(holder, holder.state_dict() | state)
        else:
            holder.load_state_dict(holder.state_dict() | state)
    except (RuntimeError, AttributeError, KeyError, ValueError) as failed:
        raise CheckpointError(
            f"the state of the loss in the checkpoint does not fit {type(holder).__name__}",
            why=str(failed).strip(),
            do="pass the loss that was trained with; or, to resume with a new one, allow_change=loss",
        ) from failed


def loss_values(state: dict[str, Any]) -> dict[str, str]:
    """Digests of what a loss was made with: names, and for buffers that are not large, values."""
    named = {name: value for name, value in state.items() if not isinstance(value, nn.Parameter)}
    small = {name: value for name, value in named.items() if not hasattr(value, "numel") or value.numel() <= _READ}
    return {"": digest(sorted(state))} | {name: digest(value) for name, value in small.items()}


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def refuse_trained_loss(holder: Any, model: nn.Module) -> None:
    """Nothing here would train it: not the optimizer, and no rank would hear of another's gradient."""
    if not isinstance(holder, nn.Module):
        return
    shared = _of_model(holder, model)
    trained = [name for name, p in holder.named_parameters() if p.requires_grad and name not in shared]
    if trained:
        raise TaskError(
            f"the loss {type(holder).__name__} has parameters with requires_grad=True: {first_of(trained)}",
            why="only the model's parameters are trained, and have their gradients reduced over the ranks",
            do="make the loss a part of the model, whose forward then returns {'loss': …}; or, if they are not to be "
            "trained, loss_fn.requires_grad_(False)",
        )


def _of_model(holder: nn.Module, model: nn.Module) -> set[str]:
    """Names in the loss of tensors that are the model's."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    named = (*holder.named_parameters(remove_duplicate=False), *holder.named_buffers(remove_duplicate=False))
    return {name for name, tensor in named if id(tensor) in own}
