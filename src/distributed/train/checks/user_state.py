"""What the user's objects keep beside the model's `state_dict()` and the optimizer: the loss's, and loose buffers.

Every rank has a loss of its own. Where samples are sharded, each calls it with its shard, so what it keeps must not
depend on the samples; in a pipeline only the ranks of the last stage call it, and theirs is the one that counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import BatchNormBase
from distributed.train.checks.digest import digest
from distributed.train.checks.nonpersistent import NonPersistent, take
from distributed.train.resume.sharing import send_tree
from distributed.train.task import Task

LOSS, BUFFERS, TASK = "loss_fn", "nonpersistent", "task"  # components of a checkpoint
_OF_MODEL, _OF_LOSS = "model", "loss_fn"  # in BUFFERS
_SETTLED = 2  # looks after which tables that the first call makes are there: before the first step and after it
_LOOKS = 8  # a state that moves on does so from the beginning


class UserState:
    """Of one rank. Made when the strategy has made the model ready."""

    def __init__(self, task: Task, plan: Plan, session: Session) -> None:
        self._task, self._mesh, self._session, self._modules = task, plan.mesh, session, _modules(task)
        self._calls = CallCheck(task, plan.batch.parts)
        self._loose = {name: NonPersistent(module) for name, module in self._modules.items()}
        self._loss = task.watch_loss()

    def here(self) -> dict[str, Any]:
        """As this rank has it, without a collective."""
        self._calls.look()
        loss = self._loss.changed()
        changed = {name: loose.changed() for name, loose in self._loose.items()}
        buffers = {name: found for name, found in changed.items() if found}
        of_task = self._task.state() if self._task.keeps_state else {}
        found = {LOSS: loss, BUFFERS: buffers, TASK: of_task}
        return {name: state for name, state in found.items() if state}

    def shared(self) -> dict[str, Any]:
        """The same on every rank, each of which comes here."""
        found = self.here()
        if self._session.world_size == 1:
            return found
        per_stage = self._mesh.world_size // self._mesh.pp
        stages = range(self._mesh.pp) if self._mesh.pp > 1 else ()
        sources = [stage * per_stage for stage in stages] or [0]
        holds = [
            json.loads(text) for text in self._session.gather_texts("state of the user's", json.dumps(list(found)))
        ]
        for name, load in ((LOSS, self._loss.take), (TASK, self._task.load_state)):
            if name in holds[sources[-1]] and self._mesh.pp > 1:  # on the other stages no step ends
                found[name] = send_tree(self._session, f"state of {name}", sources[-1], found.get(name))
                if self._session.rank < sources[-1]:
                    load(found[name])
        merged: dict[str, dict[str, Any]] = {}
        for source in sources:
            if BUFFERS in holds[source]:
                sent = send_tree(self._session, "buffers", source, found.get(BUFFERS))
                merged = {name: merged.get(name, {}) | sent.get(name, {}) for name in {*merged, *sent}}
        return {name: value for name, value in found.items() if name != BUFFERS} | ({BUFFERS: merged} if merged else {})

    def load(self, tree: Mapping[str, Any], *, takes_loss: bool = True) -> None:
        """What a checkpoint or another rank has of it. A stage of a pipeline passes over the buffers of others."""
        for name, saved in tree.get(BUFFERS, {}).items():
            if name in self._loose and (takes_loss or name != _OF_LOSS):
                module = self._modules[name]
                self._loose[name].take({path: saved[path] for path in saved if self._has_place(module, path)})
        if takes_loss and LOSS in tree:
            self._loss.take(tree[LOSS])
        if TASK in tree and self._task.keeps_state:
            self._task.load_state(tree[TASK])

    def _has_place(self, module: nn.Module, path: str) -> bool:
        """A stage of a pipeline has buffers of its own only; elsewhere one may be made later."""
        return self._mesh.pp == 1 or _is_here(module, path)

    def replicated(self) -> Iterator[tuple[str, torch.Tensor | str]]:
        """What the loss keeps: the same on all ranks that call it."""
        self._calls.look()
        place = self._mesh.coordinates(self._session.rank)["pp"]
        where = f" on stage {place}" if self._mesh.pp > 1 else ""
        for name, value in self._task.loss_state().items():
            yield f"buffer {name} of the loss{where}", _comparable(value)
        for name, value in (self._task.state() if self._task.keeps_state else {}).items():
            yield f"task state {name}{where}", _comparable(value)
        for name, module in self._task.modules_beside().items():
            for path, tensor in module.state_dict(keep_vars=True).items():
                yield f"task module {name}, {path}{where}", _comparable(tensor)


class CallCheck:
    """Refuses what each call changes, in the model's buffers or the loss's state: a pipeline calls them more often.

    It cuts each micro-batch into parts that follow each other through the stages. One process has no such parts: a
    counter, a warm-up or a moving average that each call moves on would move on faster, and the result be another one.
    """

    def __init__(self, task: Task, parts: int) -> None:
        self._task, self._parts = task, parts
        self._looks = 0
        self._before: dict[str, str] = {}

    def look(self) -> None:
        """Raise if something has moved on since the last look."""
        if self._parts == 1 or self._looks == _LOOKS:
            return
        self._looks += 1
        before, self._before = self._before, {name: digest(value) for name, value in self._state()}
        moved = [name for name, now in self._before.items() if before.get(name, now) != now]
        if not moved or self._looks <= _SETTLED:
            return
        raise TaskError(
            f"each call changes {', '.join(moved[:3])}",
            why=f"the pipeline calls the model and the loss {self._parts} times for each micro-batch of one process",
            do="set pipeline_microbatches=1, or compute it from the number of the step instead",
        )

    def _state(self) -> Iterator[tuple[str, Any]]:
        for path, owner in self._task.model.named_modules():
            if isinstance(owner, BatchNormBase):  # in a pipeline only where the user has asked for a rank's own
                continue
            for name, buffer in owner.named_buffers(recurse=False):
                if isinstance(buffer, torch.Tensor) and not buffer.is_meta:
                    yield f"the buffer {path}.{name}".replace(" .", " "), buffer
        for name, value in self._task.loss_state().items():
            yield f"{name} of the loss", value


def _comparable(value: Any) -> torch.Tensor | str:
    return value if isinstance(value, torch.Tensor) else digest(value)


def take_over(task: Task, tree: Mapping[str, Any]) -> None:
    """Before a strategy is set up: buffers as another rank has made or enlarged them, so that all have them alike."""
    for name, module in _modules(task).items():
        take(module, tree.get(BUFFERS, {}).get(name, {}))


def _modules(task: Task) -> dict[str, nn.Module]:
    loss = task.loss_module
    return {_OF_MODEL: task.model} | ({} if loss is None else {_OF_LOSS: loss})


def _is_here(module: nn.Module, path: str) -> bool:
    try:
        owner = module.get_submodule(path.rpartition(".")[0])
    except AttributeError:
        return False
    return path.rpartition(".")[2] in owner._buffers
