"""Homecoming: the trained state into the user's own objects, also where the ranks have cut the model into parts.

A model that is cut has other classes, modules and tensors in it than the user has made. What it was before is kept
without its weights, and put together again around those of the last checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distributed.checkpoint.reading import load
from distributed.core.errors import CheckpointError
from distributed.core.plan import Plan
from distributed.strategies.in_parts import is_in_parts, mark_parts
from distributed.strategies.optimizer_state import load_named_state
from distributed.train.nonpersistent import take
from distributed.train.task import Task
from distributed.train.user_state import BUFFERS, LOSS


def bring_home(task: Task, plan: Plan, checkpoint: str) -> None:
    """Into objects that are as they were before the training."""
    trained = load(checkpoint, ranks=()).shared
    lora = plan.memory.lora
    if lora is not None:
        from distributed.strategies.lora import ensure_lora  # an extra

        ensure_lora(task.model, lora, plan.seed)
    is_made = not any(tensor.is_meta for tensor in task.model.parameters())
    task.model.load_state_dict(trained["model"], strict=lora is None or not lora.saves_alone, assign=not is_made)
    _take_rest(task, trained)


def _take_rest(task: Task, trained: Mapping[str, Any]) -> None:
    if LOSS in trained:
        task.load_loss_state(trained[LOSS])
    if isinstance(task.optimizer, torch.optim.Optimizer):
        load_named_state(task.optimizer, task.model, trained["optimizer"])
    if isinstance(getattr(task.scheduler, "optimizer", None), torch.optim.Optimizer):
        task.scheduler.load_state_dict(trained["schedule"])


@dataclass(frozen=True)
class _Tensor:
    """A parameter or a buffer, without what it holds."""

    identity: int  # a tied one is one tensor under several names
    kind: type
    requires_grad: bool
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _Module:
    module: nn.Module
    path: str
    kind: type
    attributes: dict[str, Any]
    parameters: dict[str, _Tensor | None]
    buffers: dict[str, torch.Tensor | None]  # that a checkpoint does not have, or that are declared and not made
    saved: tuple[str, ...]  # buffers that it has

    @property
    def prefix(self) -> str:
        return f"{self.path}." if self.path else ""


class Before:
    """A task as it was before `fit`: classes, attributes and names. Holds no weight."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._modules = [_look_at(module, path) for path, module in task.model.named_modules()]
        names = {id(parameter): name for name, parameter in task.model.named_parameters()}
        made = task.optimizer if isinstance(task.optimizer, torch.optim.Optimizer) else None
        self._groups = [] if made is None else [[names.get(id(p)) for p in g["params"]] for g in made.param_groups]

    def restore(self, checkpoint: str) -> None:
        """The model whole again, with the weights of a checkpoint, where that has all of them and memory holds it."""
        if not is_in_parts(self._task.model):
            return
        try:
            trained = load(checkpoint, ranks=()).shared
        except CheckpointError as failed:
            warnings.warn(f"the model stays in parts: {failed}\ntrainer.save_model writes it whole", stacklevel=3)
            return
        weights: Mapping[str, torch.Tensor] = trained["model"]
        if any(name not in weights for name in self._names()) or any(None in names for names in self._groups):
            warnings.warn("the model stays in parts: its checkpoints hold some of its tensors only", stacklevel=3)
            return
        made: dict[int, nn.Parameter] = {}
        for one in self._modules:
            _put_together(one, weights, made)
        take(self._task.model, trained.get(BUFFERS, {}).get("model", {}))
        parameters = dict(self._task.model.named_parameters(remove_duplicate=False))
        if isinstance(self._task.optimizer, torch.optim.Optimizer):
            self._task.optimizer.state.clear()
            for group, names in zip(self._task.optimizer.param_groups, self._groups, strict=True):
                group["params"] = [parameters[name] for name in names if name is not None]
        _take_rest(self._task, trained)
        mark_parts(self._task.model)  # those of the other ranks are: none of them can begin anew with it

    def _names(self) -> list[str]:
        """Of what a checkpoint must have."""
        parameters = [one.prefix + name for one in self._modules for name, kept in one.parameters.items() if kept]
        return parameters + [one.prefix + name for one in self._modules for name in one.saved]


def _look_at(module: nn.Module, path: str) -> _Module:
    attributes = {key: _copied(value) for key, value in vars(module).items() if key not in ("_parameters", "_buffers")}
    parameters = {name: None if p is None else _describe(p) for name, p in module._parameters.items()}
    loose = module._non_persistent_buffers_set
    kept = {name: buffer for name, buffer in module._buffers.items() if buffer is None or name in loose}
    saved = tuple(name for name in module._buffers if name not in kept)
    return _Module(module, path, type(module), attributes, parameters, kept, saved)


def _copied(value: Any) -> Any:
    """Modules, hooks and the like are held in dictionaries and sets that a cut changes in place."""
    return value.copy() if isinstance(value, dict | set) else value


def _describe(parameter: nn.Parameter) -> _Tensor:
    return _Tensor(id(parameter), type(parameter), parameter.requires_grad, dict(vars(parameter)))


def _put_together(one: _Module, weights: Mapping[str, torch.Tensor], made: dict[int, nn.Parameter]) -> None:
    module = one.module
    module.__class__ = one.kind
    module.__dict__.clear()
    module.__dict__.update(one.attributes | {"_parameters": {}, "_buffers": dict(one.buffers)})
    for name, kept in one.parameters.items():
        if kept is not None and kept.identity not in made:
            made[kept.identity] = _parameter(kept, weights[one.prefix + name])
        module._parameters[name] = None if kept is None else made[kept.identity]
    for name in one.saved:
        module._buffers[name] = weights[one.prefix + name]


def _parameter(kept: _Tensor, value: torch.Tensor) -> nn.Parameter:
    made: nn.Parameter = torch.Tensor._make_subclass(kept.kind, value, kept.requires_grad)  # type: ignore[assignment]
    made.__dict__.update(kept.attributes)
    return made
