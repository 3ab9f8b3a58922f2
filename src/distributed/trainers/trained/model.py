"""The trained state, loaded into the user's own objects, also where the ranks have cut the model into parts.

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

from distributed.checkpoint.format.skeleton import unflatten
from distributed.checkpoint.restore.fetching import StateTree
from distributed.checkpoint.restore.reading import load_parts
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.manifests import open_checkpoint, read_manifest
from distributed.core.errors import CheckpointError
from distributed.core.plan import Plan
from distributed.runtime.host_memory import free_host_memory
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import parameter_of_class
from distributed.runtime.torch_module_compat import non_persistent_buffers
from distributed.strategies.checks.sharded_models import forget_parts, is_in_parts, mark_parts, unmark_parts
from distributed.strategies.model.copies import COPIES
from distributed.strategies.model.materialize import is_meta
from distributed.strategies.model.optimizer_state import load_named_state
from distributed.train.callbacks.callback import keyed
from distributed.train.checks.nonpersistent import take
from distributed.train.checks.user_state import BUFFERS, LOSS, TASK
from distributed.train.rank_job import RankJob
from distributed.train.task import Task

_BASE_LAYER = ".base_layer."  # where peft keeps the module that adapters are beside
_WRITTEN = 'trainer.save_model("model.safetensors") writes it whole, and does not hold it'


def load_trained_state(job: RankJob, checkpoint: str) -> None:
    """Into objects as they were before `fit`; raises where memory is short, since they would pass for trained."""
    trained = load_trained_task(job.task, job.plan, checkpoint)
    states = trained.get("callbacks", {}).get("state", {})
    for name, callback in keyed(job.callbacks).items():
        if name in states:
            callback.load_state(states[name])
    drawn = trained.get("data", {})
    if job.train.own_sampler is not None and drawn.get("sampler") is not None:
        job.train.own_sampler.load_state(drawn["sampler"], drawn["drawn"], drawn["digest"])


def load_trained_task(task: Task, plan: Plan, checkpoint: str) -> StateTree:
    """The same of a task alone; returns all that was read."""
    lacking = _lacking(task, checkpoint, "this machine")
    if lacking:
        raise CheckpointError(
            f"the run has trained, and {checkpoint} holds its model, but this process cannot",
            why=lacking,
            do=f"distributed checkpoint export {checkpoint} --to model.safetensors",
        )
    trained = _read(task, checkpoint)
    _add_adapters(task, plan)
    lora = plan.memory.lora
    is_made = not any(tensor.is_meta for tensor in task.model.parameters())
    task.model.load_state_dict(trained["model"], strict=lora is None or not lora.saves_alone, assign=not is_made)
    _take_rest(task, trained)
    take(task.model, trained.get(BUFFERS, {}).get("model", {}))
    if task.loss_module is not None:
        take(task.loss_module, trained.get(BUFFERS, {}).get("loss_fn", {}))
    return trained


def _lacking(task: Task, checkpoint: str, node: str, ranks: int = 1) -> str:
    """What memory a node lacks to read the trained state as often as it has ranks; "": none."""
    shared = read_manifest(*open_checkpoint(checkpoint)).shared
    needed = ranks * sum(entry.nbytes for name, entry in shared.tensors.items() if _is_wanted(task, name))
    free = free_host_memory()
    if needed <= free:
        return ""
    what = "the whole model" + (" with its optimizer" if isinstance(task.optimizer, torch.optim.Optimizer) else "")
    takes = f"{what} takes {_in_words(needed)} for {ranks} rank{'s' * (ranks > 1)}"
    return f"{takes}; {node} has {_in_words(free)} of memory free"


def _in_words(count: int) -> str:
    """
    >>> _in_words(13 * 2**30), _in_words(5 * 2**19)
    ('13.0 GiB', '2.5 MiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _is_wanted(task: Task, name: str) -> bool:
    """Of a checkpoint's tensors: an optimizer that we have made is ours to forget."""
    kind = name.partition("/")[0]
    return kind != COPIES and (kind != "optimizer" or isinstance(task.optimizer, torch.optim.Optimizer))


def _read(task: Task, checkpoint: str) -> StateTree:
    storage, name = open_checkpoint(checkpoint)
    manifest = read_manifest(storage, name)
    (trained,) = load_parts(
        manifest,
        [manifest.shared],
        ChunkStore(storage),
        boxes=lambda name, shape: None if _is_wanted(task, name) else (),
    )
    return trained


def _add_adapters(task: Task, plan: Plan) -> None:
    if plan.memory.lora is not None:
        from distributed.strategies.model.lora import ensure_lora  # an extra

        ensure_lora(task.model, plan.memory.lora, plan.seed)


def _take_rest(task: Task, trained: Mapping[str, Any]) -> None:
    if LOSS in trained:
        task.load_loss_state(trained[LOSS])
    if TASK in trained and task.keeps_state:
        task.load_state(trained[TASK])
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

    def __init__(self, task: Task, plan: Plan) -> None:
        self._task, self._plan = task, plan
        self.was_on_meta = is_meta(task.model)
        self.is_whole = False  # whether the model has been made whole on this rank
        self._modules = [_look_at(module, path) for path, module in task.model.named_modules()]
        names = {id(parameter): name for name, parameter in task.model.named_parameters()}
        made = task.optimizer if isinstance(task.optimizer, torch.optim.Optimizer) else None
        self._groups = [] if made is None else [[names.get(id(p)) for p in g["params"]] for g in made.param_groups]

    def restore(self, checkpoint: str) -> None:
        """The model whole again, with the weights of a checkpoint, where that has all of them and memory holds it."""
        if not is_in_parts(self._task.model):
            return
        lacking = self._lacking(checkpoint, "the node of rank 0")
        if lacking:
            warnings.warn(f"the model stays sharded: {lacking}\n{_WRITTEN}", stacklevel=4)
        elif self._make_whole(checkpoint):
            mark_parts(self._task.model)  # on the other ranks it still is: no rank can train it again

    def restore_alone(self, checkpoint: str) -> None:
        """The same of a run of one rank, which can then be trained again."""
        self.restore(checkpoint)
        if self.is_whole:
            unmark_parts(self._task.model)

    def restore_on_all(self, checkpoint: str, session: Session) -> None:
        """The same on every rank, so that all can train it again; on rank 0 alone where memory is short."""
        session.report_collectives_to(None)  # the heartbeat of the run has ended with it
        parts = torch.tensor(float(is_in_parts(self._task.model)), device=session.device)
        if not session.sum("whether the model is sharded", parts):  # after which the last checkpoint is there, too
            return
        node = f"the node of rank {session.rank}"
        lacking = session.gather_texts(
            "memory for the whole model", self._lacking(checkpoint, node, session.env.local_world_size)
        )
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

    def make_blank(self, checkpoint: str, *, on_meta: bool) -> None:
        """The model uncut, in the shapes of a checkpoint, with memory that nothing was written to, or with none."""
        shared = read_manifest(*open_checkpoint(checkpoint)).shared
        tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta" if on_meta else "cpu")
            for name, entry in shared.tensors.items()
            if name.startswith("model/")
        }
        weights = unflatten({"model": shared.skeleton["model"]}, tensors)["model"]
        of_modules, made = self._without_adapters(weights), dict[int, nn.Parameter]()
        for one in self._modules:
            _put_together(one, of_modules, made)
        if of_modules is not weights:
            _add_adapters(self._task, self._plan)

    def _lacking(self, checkpoint: str, node: str, ranks: int = 1) -> str:
        try:
            return _lacking(self._task, checkpoint, node, ranks)
        except CheckpointError as failed:
            return str(failed)

    def _make_whole(self, checkpoint: str) -> bool:
        """Whether the model is whole now."""
        try:
            trained = _read(self._task, checkpoint)
        except CheckpointError as failed:
            warnings.warn(f"the model stays sharded: {failed}\n{_WRITTEN}", stacklevel=4)
            return False
        weights: Mapping[str, torch.Tensor] = trained["model"]
        of_modules = self._without_adapters(weights)
        if any(name not in of_modules for name in self._names()) or any(None in names for names in self._groups):
            warnings.warn("the model stays sharded: its checkpoints do not hold all of its tensors", stacklevel=4)
            return False
        made: dict[int, nn.Parameter] = {}
        for one in self._modules:
            _put_together(one, of_modules, made)
        if of_modules is not weights:
            _add_adapters(self._task, self._plan)
            self._task.model.load_state_dict(weights)
        take(self._task.model, trained.get(BUFFERS, {}).get("model", {}))
        parameters = dict(self._task.model.named_parameters(remove_duplicate=False))
        if isinstance(self._task.optimizer, torch.optim.Optimizer):
            self._task.optimizer.state.clear()
            for group, names in zip(self._task.optimizer.param_groups, self._groups, strict=True):
                group["params"] = [parameters[name] for name in names if name is not None]
        _take_rest(self._task, trained)
        self.is_whole = True
        return True

    def _without_adapters(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """By the names that the modules had before the run put adapters beside some of them."""
        if self._plan.memory.lora is None or all(name in weights for name in self._names()):
            return weights
        return {name.replace(_BASE_LAYER, "."): value for name, value in weights.items()}

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
    attributes = {key: _copied(value) for key, value in one.attributes.items()}  # it may be cut once more
    module.__dict__.update(attributes | {"_parameters": {}, "_buffers": _on_host(one.buffers)})
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
