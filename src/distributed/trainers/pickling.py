"""Pickling of a job: what cloudpickle and torch leave out or refuse travels to the ranks too.

What describes an object is what `reducer_override` returns: constructor, arguments, state, and a function that sets
the state.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from distributed.runtime.torch_module_compat import OPTIMIZER_HOOKS, gradient_hooks, parametrize_again

_STATE_OF_OPTIMIZERS: Any = torch.optim.Optimizer.__getstate__
_MAPPED_BYTES = 1 << 16  # arrays from this size on travel as tensors, which the ranks map


class JobPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, so that classes and functions of a script or notebook travel by value."""

    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) is np.ndarray
            and obj.nbytes >= _MAPPED_BYTES
            and obj.dtype.kind in "fiub"
            and obj.flags.c_contiguous
        ):
            writable = obj if obj.flags.writeable else obj.copy()
            return _as_array, (torch.from_numpy(writable),)
        if _is_parametrized(obj):
            return _describe_parametrized(obj)
        if _hooks_of(obj) or isinstance(obj, torch.optim.Optimizer):
            return _describe_hooked(obj)
        return super().reducer_override(obj)


class PickleModule:
    """What torch.save needs of a pickle module."""

    __name__ = "cloudpickle"
    Pickler = JobPickler
    dumps = staticmethod(cloudpickle.dumps)


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.numpy()


def _is_parametrized(value: Any) -> bool:
    return isinstance(value, nn.Module) and parametrize.is_parametrized(value) and _class_of(value) is not type(value)


def _describe_parametrized(module: nn.Module) -> tuple[Any, ...]:
    """torch gives such a module (weight norm, spectral norm) a class made at run time, which refuses to be pickled.

    It is made again of the class before, the names of its parametrized tensors and its attributes.
    """
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    return _make_parametrized, (_class_of(module), names), dict(module.__dict__), None, None, _set_attributes


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class before its first parametrization."""
    kind = type(module)
    is_made = "__getstate__" in vars(kind) and kind.__name__ == f"Parametrized{kind.__base__.__name__}"  # type: ignore[union-attr]
    return kind.__base__ if is_made else kind  # type: ignore[return-value]


def _make_parametrized(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    module = kind.__new__(kind)
    parametrize_again(module, names)
    return module


def _set_attributes(module: nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)


def _describe_hooked(value: Any) -> tuple[Any, ...]:
    """Hooks on parameters and optimizers, which torch leaves out: a part of the state, so that they may refer to it.

    So are attributes of an optimizer beside its groups and its state: LBFGS keeps a list of its parameters.
    """
    made, given, *own = value.__reduce_ex__(4)
    state = own[0] if own else None
    return made, given, (state, _hooks_of(value), _beside(value, state)), None, None, _set_hooks


def _hooks_of(value: Any) -> dict[str, Any]:
    if isinstance(value, nn.Parameter):
        found = zip(("before", "after"), gradient_hooks(value), strict=True)
        return {kind: list(hooks.values()) for kind, hooks in found if hooks}
    if isinstance(value, torch.optim.Optimizer):
        return {name: hooks for name in OPTIMIZER_HOOKS if (hooks := value.__dict__.get(name))}
    return {}


def _beside(value: Any, state: Any) -> dict[str, Any]:
    """An optimizer's attributes that its own state for pickling lacks, where that is torch's."""
    if not isinstance(value, torch.optim.Optimizer) or type(value).__getstate__ is not _STATE_OF_OPTIMIZERS:
        return {}
    left_out = {*(state or ()), *OPTIMIZER_HOOKS, "step", "_opt_called"}  # the last two are a scheduler's
    return {name: item for name, item in vars(value).items() if name not in left_out}


def _set_hooks(value: Any, state: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
    own, hooks, beside = state
    if isinstance(value, nn.Parameter):
        for hook in hooks.get("before", ()):
            value.register_hook(hook)
        for hook in hooks.get("after", ()):
            value.register_post_accumulate_grad_hook(hook)
    else:
        value.__setstate__(own)
        vars(value).update(beside)
        for name, found in hooks.items():
            getattr(value, name).update(found)
