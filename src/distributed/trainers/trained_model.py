"""The trained state, loaded into the user's own objects, also where the ranks have cut the model into parts.

A model that is cut has other classes, modules and tensors in it than the user has made. What it was before is kept
without its weights, and put together again around those of the last checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from distributed.checkpoint.restore.fetching import StateTree
from distributed.checkpoint.restore.reading import load, load_parts
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.manifests import open_checkpoint, read_manifest
from distributed.core.errors import CheckpointError
from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import parameter_of_class
from distributed.runtime.torch_module_compat import non_persistent_buffers
from distributed.strategies.checks.sharded_models import forget_parts, is_in_parts, mark_parts
from distributed.strategies.model.optimizer_state import load_named_state
from distributed.train.checks.nonpersistent import take
from distributed.train.checks.user_state import BUFFERS, LOSS
from distributed.train.task import Task


def load_trained_state(task: Task, plan: Plan, checkpoint: str) -> None:
    """Into objects that are as they were before the training."""
    trained = load(checkpoint, ranks=()).shared
    lora = plan.memory.lora
    if lora is not None:
        from distributed.strategies.model.lora import ensure_lora  # an extra

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


class UntrainedTask:
    """A task as it was before `fit`: classes, attributes and names. Holds no weight."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._modules = [_look_at(module, path) for path, module in task.model.named_modules()]
        names = {id(parameter): name for name, parameter in task.model.named_parameters()}
        made = task.optimizer if isinstance(task.optimizer, torch.optim.Optimizer) else None
        self._groups = [] if made is None else [[names.get(id(p)) for p in g["params"]] for g in made.param_groups]

    def restore(self, checkpoint: str) -> None:
        """The model whole again, with the weights of a checkpoint, where that has all of them and memory holds it."""
        if is_in_parts(self._task.model) and self._make_whole(checkpoint):
            mark_parts(self._task.model)  # on the other ranks it still is: no rank can train it again

    def restore_on_all(self, checkpoint: str, session: Session) -> None:
        """The same on every rank, so that all can train it again; on rank 0 alone where memory is short."""
        session.report_collectives_to(None)  # the heartbeat of the run has ended with it
        parts = torch.tensor(float(is_in_parts(self._task.model)), device=session.device)
        if not session.sum("whether the model is sharded", parts):  # after which the last checkpoint is there, too
            return
        lacking = session.gather_texts("memory for the whole model", self._lacking(checkpoint, session))
        if any(lacking):
            if session.is_main:
                why = next(text for text in lacking if text)
                warnings.warn(f"whole_model_on='all', but rank 0 alone gets the whole model: {why}", stacklevel=3)
                self.restore(checkpoint)
            return
        failed: Exception | None = None
        try:
            parts.fill_(float(not self._make_whole(checkpoint)))
        except Exception as error:  # noqa: BLE001 - reported to the other ranks first, who wait; then raised
            failed = error
            parts.fill_(1.0)
        if session.sum("the whole model", parts):
            mark_parts(self._task.model)
        if failed is not None:
            raise failed

    def _lacking(self, checkpoint: str, session: Session) -> str:
        """What memory this node lacks to hold the model as often as it has ranks; "": none."""
        try:
            manifest = read_manifest(*open_checkpoint(checkpoint))
        except CheckpointError as failed:
            return str(failed)
        ranks, free = session.env.local_world_size, psutil.virtual_memory().available
        needed = sum(entry.nbytes for name, entry in manifest.shared.tensors.items() if self._is_wanted(name))
        if needed * ranks <= free:
            return ""
        times = f"{needed * ranks / 2**30:.1f} GiB for {ranks} rank{'s' * (ranks > 1)}"
        return (
            f"the whole model takes {times}; the node of rank {session.rank} has {free / 2**30:.1f} GiB of memory free"
        )

    def _is_wanted(self, name: str) -> bool:
        """Of a checkpoint's tensors: an optimizer that we have made is ours to forget."""
        return isinstance(self._task.optimizer, torch.optim.Optimizer) or not name.startswith("optimizer/")

    def _read(self, checkpoint: str) -> StateTree:
        storage, name = open_checkpoint(checkpoint)
        manifest = read_manifest(storage, name)
        (trained,) = load_parts(
            manifest,
            [manifest.shared],
            ChunkStore(storage),
            boxes=lambda name, shape: None if self._is_wanted(name) else (),
        )
        return trained

    def _make_whole(self, checkpoint: str) -> bool:
        """Whether the model is whole now."""
        try:
            trained = self._read(checkpoint)
        except CheckpointError as failed:
            warnings.warn(f"the model stays sharded: {failed}\ntrainer.save_model writes it whole", stacklevel=4)
            return False
        weights: Mapping[str, torch.Tensor] = trained["model"]
        if any(name not in weights for name in self._names()) or any(None in names for names in self._groups):
            warnings.warn("the model stays sharded: its checkpoints do not hold all of its tensors", stacklevel=4)
            return False
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
        return True

    def _names(self) -> list[str]:
        """Of what a checkpoint must have."""
        parameters = [one.prefix + name for one in self._modules for name, kept in one.parameters.items() if kept]
        return parameters + [one.prefix + name for one in self._modules for name in one.saved]


def _look_at(module: nn.Module, path: str) -> _Module:
    attributes = {key: _copied(value) for key, value in vars(module).items() if key not in ("_parameters", "_buffers")}
    parameters = {name: None if p is None else _describe(p) for name, p in module._parameters.items()}
    loose = non_persistent_buffers(module)
    kept = {name: buffer for name, buffer in module._buffers.items() if buffer is None or name in loose}
    saved = tuple(name for name in module._buffers if name not in kept)
    return _Module(
        module, path=path, kind=type(module), attributes=attributes, parameters=parameters, buffers=kept, saved=saved
    )


def _copied(value: Any) -> Any:
    """Modules, hooks and the like are held in dictionaries and sets that a cut changes in place."""
    return value.copy() if isinstance(value, dict | set) else value


def _describe(parameter: nn.Parameter) -> _Tensor:
    return _Tensor(id(parameter), type(parameter), parameter.requires_grad, dict(vars(parameter)))


def _put_together(one: _Module, weights: Mapping[str, torch.Tensor], made: dict[int, nn.Parameter]) -> None:
    module = one.module
    forget_parts(module)
    module.__class__ = one.kind
    module.__dict__.clear()
    module.__dict__.update(one.attributes | {"_parameters": {}, "_buffers": _on_host(one.buffers)})
    for name, kept in one.parameters.items():
        if kept is not None and kept.identity not in made:
            made[kept.identity] = _parameter(kept, weights[one.prefix + name])
        module._parameters[name] = None if kept is None else made[kept.identity]
    for name in one.saved:
        module._buffers[name] = weights[one.prefix + name]


def _on_host(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Where the weights of a checkpoint are: a module has one device."""
    return {name: buffer if buffer is None or buffer.is_meta else buffer.cpu() for name, buffer in buffers.items()}


def _parameter(kept: _Tensor, value: torch.Tensor) -> nn.Parameter:
    made: nn.Parameter = parameter_of_class(kept.kind, value, kept.requires_grad)
    made.__dict__.update(kept.attributes)
    return made
