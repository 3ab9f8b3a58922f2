"""Keras objects that a model is compiled with, in a form that can be sent and made again elsewhere."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from distributed.core.errors import TaskError
from distributed.engines.tensorflow.input.sources import map_tree

LIBRARIES = ("keras", "tf_keras")


@dataclass(frozen=True)
class Remade:
    """A Keras object that holds variables: it is rebuilt in the process that uses them."""

    kind: type
    config: dict[str, Any]

    def make(self) -> Any:
        return self.kind.from_config(self.config)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Copied:
    """A loss whose config lacks its parameters. Keras would pickle it by that config; its attributes are all
    that it is, since losses hold no variables."""

    kind: type
    attributes: dict[str, Any]

    def make(self) -> Any:
        copy: Any = object.__new__(self.kind)
        copy.__dict__.update(self.attributes)
        return copy


def decompose(value: Any) -> Any:
    """The same structure, with each Keras object in it taken apart."""
    return map_tree(lambda leaf: _decompose(leaf) if hasattr(leaf, "get_config") else leaf, value)


def made(value: Any) -> Any:
    return map_tree(lambda leaf: leaf.make() if isinstance(leaf, Remade | Copied) else leaf, value)


def _decompose(leaf: Any) -> Remade | Copied:
    kind, config = type(leaf), leaf.get_config()
    if _is_of_keras(kind) or not _is_of_keras(_owner(kind, "get_config")):
        return Remade(kind, config)
    if any(base.__name__ == "Loss" and _is_of_keras(base) for base in kind.__mro__):
        return Copied(kind, dict(leaf.__dict__))
    parameters = list(inspect.signature(kind).parameters.values())
    missing = [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    missing = [name for name in missing if name not in config]
    if missing:
        raise TaskError(
            f"{kind.__name__} cannot be sent to other processes",
            why=f"the class has no get_config of its own, and Keras's does not contain its {', '.join(missing)}",
            do=f"give {kind.__name__} a get_config that has them, or pass a function that builds and compiles all",
        )
    return Remade(kind, config)


def _owner(kind: type, name: str) -> type:
    return next(one for one in kind.__mro__ if name in one.__dict__)


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES
