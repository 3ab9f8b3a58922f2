"""Plain modules, which may be computed in another way than by their own forward: the one place that decides."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import nn

from distributed.runtime.torch_compat import BatchNormBase

_NORMALIZING = {"batch_norm", "sync_batch_norm", "instance_norm"}  # functions that are computed over all ranks


def is_plain(module: nn.Module, kind: type[nn.Module], *tensors: str) -> bool:
    """Whether a module computes what torch's class does, from parameters of these names.

    False if a subclass or the module itself has another forward, or if a parametrization or weight_norm computes a
    weight from other parameters.

    >>> is_plain(nn.Linear(2, 2), nn.Linear, "weight")
    True
    >>> is_plain(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear, "weight")
    False
    """
    is_own = isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in module.__dict__
    return is_own and all(name in module._parameters for name in tensors)


def normalizes_by_function(layer: BatchNormBase) -> bool:
    """Whether a BatchNorm layer normalizes by torch's function, as its base class does.

    >>> normalizes_by_function(nn.BatchNorm1d(2))
    True
    """
    forward = layer.__dict__.get("forward") or type(layer).forward
    return _reaches(forward, type(layer), set())


def _reaches(function: Any, owner: type, seen: set[int]) -> bool:
    """Whether code uses such a function, directly or through a method, a function of its module or a base class."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return False
    seen.add(id(code))
    names = _names_in(code)
    if _NORMALIZING & names:
        return True
    called = [getattr(owner, name, None) or function.__globals__.get(name) for name in names - {"forward"}]
    if "forward" in names and "super" in names:
        called.append(_forward_above(owner, code))
    elif "forward" in names:  # as nn.BatchNorm2d.forward(self, x)
        called += [kind.forward for kind in owner.__mro__ if kind.__name__ in names and hasattr(kind, "forward")]
    return any(isinstance(value, types.FunctionType) and _reaches(value, owner, seen) for value in called)


def _forward_above(owner: type, code: types.CodeType) -> Any:
    """The forward that super().forward means in the class with this code."""
    forwards = [vars(kind)["forward"] for kind in owner.__mro__ if "forward" in vars(kind)]
    codes = [getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards]
    return forwards[min(codes.index(code) + 1, len(forwards) - 1)] if code in codes else BatchNormBase.forward


def _names_in(code: types.CodeType) -> set[str]:
    found = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
    return found
