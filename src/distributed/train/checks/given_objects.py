"""What training changes in the objects that were given to `fit`, of which ranks have copies that end with them.

The trained model, optimizer, loss and callbacks come back from a checkpoint. All else that their code reaches in Python
is looked at before the first step and after the last: what has changed is said, as the caller's objects are as before.
Tensors outside of the model that hooks change in the first steps, an average of weights say, are refused at once.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from distributed.core.errors import Problem, TaskError, first_of
from distributed.data.source import Source
from distributed.runtime.torch_module_compat import MODULE_HOOKS, gradient_hooks, step_hooks
from distributed.train.callbacks.callback import Callback, keyed, overrides
from distributed.train.checks.marks import TensorMark
from distributed.train.checks.reachable import Look, changed_paths, is_library, look
from distributed.train.task import Task
from distributed.train.whole_set.torch_metrics import is_collection, is_metric

_SHOWN = 4
_INSTEAD = (
    "use callbacks.EMA or callbacks.SWA, or a callback of yours whose state() has it; or run the script by "
    "`distributed train`, where no process is there that could have it back"
)


class GivenObjects:
    """Of one rank, which has copies of what was given. Made before its strategy is set up."""

    def __init__(self, task: Task, train: Source, callbacks: Sequence[Callback]) -> None:
        self._task, self._train = task, train
        self._callbacks = {name: callback for name, callback in keyed(callbacks).items() if _is_users(callback)}
        self._as_given = {name: _dumped(callback) for name, callback in self._callbacks.items()}
        self._hooks = hooks_of_user(task)
        self._attributes = [
            (f"model.{path}".rstrip("."), module, sorted(vars(module).keys() - vars(nn.Module()).keys()))
            for path, module in task.model.named_modules()
            if _is_users(module)
        ]
        self._before: Look | None = None
        self._is_blind = False  # whether a look has failed

    def begin(self) -> None:
        """The first step of this rank comes next."""
        if self._before is None:
            self._before = self._look()

    def refuse_changed_tensors(self) -> None:
        """After the first steps: raise if hooks change tensors that would not come back."""
        assert self._before is not None
        now = self._look()
        if self._is_blind:
            return
        paths = [path for path in changed_paths(self._before, now) if path.startswith(tuple(self._hooks) or ("\0",))]
        tensors = [path for path in paths if _is_tensor(path, self._before, now)]
        if tensors:
            raise TaskError(
                f"training changes {first_of(tensors, _SHOWN)}, which would not come back from the ranks",
                why="fit starts the ranks, which have copies of what a hook reaches; the model, the optimizer, the "
                "loss and the state() of callbacks come back",
                do=_INSTEAD,
            )

    def left(self) -> list[str]:
        """After the last step: what has changed, and does not come back."""
        if self._before is None:
            return []
        now = self._look()
        found = [] if self._is_blind else changed_paths(self._before, now)
        return list(dict.fromkeys([*found, *self._left_of_callbacks()]))

    def _look(self) -> Look:
        try:
            return self._look_at_all()
        except Exception:  # noqa: BLE001 - objects of the user's may do anything when they are looked at
            self._is_blind = True
            return Look({})

    def _look_at_all(self) -> Look:
        task = self._task
        metrics = dict(task.metrics or {})
        for name in [name for name, one in metrics.items() if is_metric(one) or is_collection(one)]:
            del metrics[name]  # begins anew with each evaluation
        parts: dict[str, Any] = dict(self._hooks) | {"loss_fn": task.loss_fn, "metrics": metrics}
        parts |= dict(getattr(task, "steps", {}))
        if not task.keeps_state:  # else its state comes back
            parts |= {f"task.{name}": value for name, value in task.own_attributes().items()}
        for name, made in (("optimizer", task.optimizer), ("scheduler", task.scheduler)):
            if callable(made) and not isinstance(made, type) and not hasattr(made, "state_dict"):
                parts[name] = made
        for path, module, names in self._attributes:
            parts |= {f"{path}.{name}": vars(module)[name] for name in names if name in vars(module)}
        sampler = None if self._train.own_sampler is None else self._train.own_sampler.sampler
        is_of_epoch = is_library(type(sampler).__module__) and hasattr(sampler, "set_epoch")  # which tells it all
        if sampler is not None and not hasattr(sampler, "load_state_dict") and not is_of_epoch:
            parts["train_loader.sampler"] = sampler
        return look({name: part for name, part in parts.items() if part is not None}, passed=self._returned())

    def _returned(self) -> Iterator[Any]:
        """What comes back, or is the model's own matter."""
        task = self._task
        yield from (task, self._train.dataset)
        yield from (made for made in (task.optimizer, task.scheduler) if hasattr(made, "state_dict"))
        yield from of_module(task.model)
        yield from task.loss_state().values()
        if isinstance(task.optimizer, torch.optim.Optimizer):
            yield from (group for group in task.optimizer.param_groups)
            yield from (value for state in task.optimizer.state.values() for value in (state, *state.values()))

    def _left_of_callbacks(self) -> Iterator[str]:
        """Attributes that `load_state` would not bring back."""
        for name, callback in self._callbacks.items():
            fresh = _loaded(self._as_given[name])
            if fresh is None:
                continue
            given = dict(vars(fresh))
            if state := callback.state():
                fresh.load_state(state)
            for attribute, value in vars(callback).items():
                if not _is_same(value, vars(fresh).get(attribute)) and not _is_same(value, given.get(attribute)):
                    yield f"{name}.{attribute}"


def refuse_unreturnable(task: Task, callbacks: Sequence[Callback]) -> None:
    """Before ranks are started: raise if a hook or a callback averages weights that would not come back."""
    own = {id(part) for part in of_module(task.model)} | {id(task.loss_module)}
    problems = []
    for name, part in _averaging_parts(task, callbacks):
        optimizer = [task.optimizer] if isinstance(task.optimizer, torch.optim.Optimizer) else []
        found = look({name: part}, passed=[*of_module(task.model), *optimizer])
        modules = [m for m in found.held if isinstance(m, nn.Module) and id(m) not in own and _has_tensors(m)]
        if not name.startswith("a step hook"):
            modules = [module for module in modules if isinstance(module, AveragedModel)]
        if modules:
            problems.append(
                Problem(
                    f"{name} reaches a module outside of the model: {type(modules[0]).__name__}",
                    why="fit starts the ranks, which have copies of it; what they change there does not come back",
                    do=_INSTEAD,
                )
            )
    if problems:
        raise TaskError(problems)


def about_left(left: Sequence[str]) -> str:
    """For people: what has changed in the ranks alone."""
    return (
        f"training has changed {first_of(left, _SHOWN)} in the ranks, and here it is as before: fit has started the "
        "ranks as processes of their own. Keep it in a buffer, or in the state() of a callback; or run the script by "
        "`distributed train`"
    )


def hooks_of_user(task: Task) -> dict[str, Any]:
    """Hooks on the model, its parameters and the optimizer, by names for people."""
    found: dict[str, Any] = {}
    for path, module in task.model.named_modules():
        for kind in MODULE_HOOKS:
            _add(found, f"a hook of the module {path or type(module).__name__}", getattr(module, kind).values())
    for name, parameter in task.model.named_parameters():
        for hooks in gradient_hooks(parameter):
            _add(found, f"a hook of the parameter {name}", (hooks or {}).values())
    if isinstance(task.optimizer, torch.optim.Optimizer):
        for hooks in step_hooks(task.optimizer):
            _add(found, "a step hook of the optimizer", hooks.values())
    return found


def of_module(module: nn.Module) -> Iterator[Any]:
    """A module with all that it is made of."""
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()


def _averaging_parts(task: Task, callbacks: Sequence[Callback]) -> Iterator[tuple[str, Any]]:
    yield from hooks_of_user(task).items()
    if callable(task.optimizer) and not isinstance(task.optimizer, type):
        yield "the function that makes the optimizer", task.optimizer
    for name, callback in keyed(callbacks).items():
        if _is_users(callback) and not overrides(callback, "state"):
            yield f"the callback {name}, which has no state(),", dict(vars(callback))


def _add(found: dict[str, Any], name: str, hooks: Iterable[Any]) -> None:
    for hook in hooks:
        if _is_users(hook):
            number = sum(other.startswith(name) for other in found)
            found[name if not number else f"{name} ({number + 1})"] = hook


def _is_users(thing: Any) -> bool:
    """Whether its class, or the function itself, is not of a library that keeps nothing between steps."""
    if isinstance(thing, functools.partial):
        return True
    return not is_library(getattr(thing, "__module__", type(thing).__module__))


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _is_tensor(path: str, before: Look, now: Look) -> bool:
    return isinstance(before.marks.get(path), TensorMark) and isinstance(now.marks.get(path), TensorMark)


def _dumped(callback: Callback) -> bytes | None:
    try:
        return bytes(cloudpickle.dumps(callback))
    except Exception:  # noqa: BLE001 - pickling runs any object's own code
        return None


def _loaded(data: bytes | None) -> Callback | None:
    return None if data is None else pickle.loads(data)


def _is_same(one: Any, other: Any) -> bool:
    """Equal, or pickled alike; pickles of equal values may differ, where parts of one are the same object."""
    with suppress(Exception):  # of arrays and objects of the user's, whose == may return or do anything
        if (one == other) is True:
            return True
    try:
        return bool(cloudpickle.dumps(one) == cloudpickle.dumps(other))
    except Exception:  # noqa: BLE001 - pickling runs any object's own code
        return one is other
