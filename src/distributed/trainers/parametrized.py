"""How a parametrized module (weight norm, spectral norm, orthogonal weights) travels to the ranks.

torch gives such a module a class of its own, made at run time, that refuses to be pickled. It is described by the class
that it was made of, the names of its parametrized tensors and its attributes, and made again from these.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from distributed.runtime.torch_module_compat import parametrize_again


def is_parametrized(value: Any) -> bool:
    return isinstance(value, nn.Module) and parametrize.is_parametrized(value) and _class_of(value) is not type(value)


def describe(module: nn.Module) -> tuple[Any, ...]:
    """What pickle's `reducer_override` returns: constructor, arguments, state, and a function that sets the state."""
    return _make, (_class_of(module), tuple(module.parametrizations)), dict(module.__dict__), None, None, _fill  # type: ignore[arg-type]


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class before its first parametrization."""
    kind = type(module)
    is_made = "__getstate__" in vars(kind) and kind.__name__ == f"Parametrized{kind.__base__.__name__}"  # type: ignore[union-attr]
    return kind.__base__ if is_made else kind  # type: ignore[return-value]


def _make(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    module = kind.__new__(kind)
    parametrize_again(module, names)
    return module


def _fill(module: nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
