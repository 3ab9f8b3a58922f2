"""Reachable state: all that Python keeps for a model and its loss, looked at without running any of their code.

A look walks attributes, slots, containers, closures, the classes, and the globals that their functions read, nearest
first and within a bound. Two looks show what a step has changed. What has no parts in Python is named as unseen.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from distributed.core.env import inherited_environ
from distributed.train.checks.marks import Drawn, Marker, TensorMark, TooLarge, iterator_mark, same

OBJECTS = 200_000  # that a look walks at most
_LIBRARIES = frozenset(  # whose classes and functions keep nothing between steps; their objects are walked
    ("accelerate", "distributed", "einops", "numpy", "pandas", "peft", "scipy", "torch", "transformers", "triton")
) | {"lightning_utilities", "sklearn", "torchaudio", "torchmetrics", "torchvision"}
_OF_FSDP = "__composable_api_state_key"  # where a sharded module keeps its buffers and its place in a pass
_OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}  # what every module has, walked by its own rules
_SEQUENCES = (list, tuple, deque, set, frozenset)
_WITHOUT_STATE = (
    type,
    types.ModuleType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
    type(Ellipsis),
    type(NotImplemented),
    slice,
    np.dtype,
    logging.Logger,
)
_SILENT = frozenset(("builtins", "torch", "types", "typing", "functools", "operator", "weakref", "threading")) | {
    "_thread",
    "_io",
    "_abc",
}  # whose objects have no parts in Python, and nothing that a model counts with
_SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction, torch.ScriptObject)
_CACHED = type(functools.cache(lambda: None))
_EMPTY = object.__basicsize__


@dataclass(frozen=True)
class Look:
    """What was found: a mark at each path, and the paths of what cannot be seen into."""

    marks: Mapping[str, Any]
    unseen: tuple[str, ...] = ()
    held: Sequence[Any] = field(default=(), repr=False)  # what identities in the marks are of


def look(parts: Mapping[str, Any], own: Sequence[torch.Tensor] = (), passed: Iterable[Any] = ()) -> Look:
    """Of these parts by name. `own`: tensors that a step is known to change, of which only the place is looked at.

    `passed`: objects that are not entered, nor looked at.
    """
    return _Walk(frozenset(map(id, own)), frozenset(map(id, passed))).over(parts)


def changed_paths(before: Look, after: Look) -> list[str]:
    """What is not as it was, or was not there."""
    paths = [path for path in after.marks if path not in before.marks]
    return paths + [path for path, was in before.marks.items() if not same(was, after.marks.get(path))]


def changes(before: Look, after: Look) -> list[str]:
    """What is not as it was, as reasons why a step cannot be captured.

    >>> model = nn.Linear(1, 1)
    >>> model.warmup = types.SimpleNamespace(t=1)
    >>> first = look({"model": model})
    >>> model.warmup.t = 2
    >>> changes(first, look({"model": model}))
    ['it counts in Python: model.warmup.t changes']
    """
    paths = changed_paths(before, after)
    return [_reason(path, before.marks.get(path), after.marks.get(path)) for path in paths]


def _reason(path: str, was: Any, now: Any) -> str:
    if isinstance(was, Drawn) and isinstance(now, Drawn):
        return f"it draws from the generator {path}, on the host"
    if isinstance(was, TensorMark) and isinstance(now, TensorMark) and was[:2] == now[:2]:
        if was.needs_grad != now.needs_grad:
            return f"it changes whether {path} requires a gradient"
        return f"it changes the tensor {path} in place, which is no buffer: register_buffer would make it one"
    if isinstance(was, TensorMark) or isinstance(now, TensorMark):
        return f"it puts another tensor in the place of {path}"
    return f"it counts in Python: {path} changes"


class _Walk:
    def __init__(self, own: frozenset[int], passed: frozenset[int]) -> None:
        self._passed = passed
        self._marker = Marker(own)
        self._marks: dict[str, Any] = {}
        self._unseen: list[str] = []
        self._seen: dict[int, Any] = {}  # by identity; held, so that no identity is used a second time
        self._next: deque[tuple[str, Any]] = deque()
        self._left = OBJECTS
        self._kinds: dict[type, bool] = {}  # whether objects of it are made of Python alone

    def over(self, parts: Mapping[str, Any]) -> Look:
        self._add(parts.items())
        while self._next:
            path, value = self._next.popleft()
            self._visit(path, value)
        return Look(self._marks, tuple(self._unseen), list(self._seen.values()))

    def _add(self, found: Iterable[tuple[str, Any]]) -> None:
        for path, value in found:
            if not self._left:
                self._unseen.append(f"{path}, which comes after {OBJECTS} others,")
                self._left = -1
            if self._left < 0:
                return
            self._left -= 1
            self._next.append((path, value))

    def _visit(self, path: str, value: Any) -> None:
        if id(value) in self._passed:
            return
        try:
            mark = self._marker.mark(value)
        except TooLarge:
            self._unseen.append(f"{path} (an array that is larger than what is looked at)")
            return
        if mark is not None:
            self._marks[path] = mark
            if not isinstance(mark, TensorMark | Drawn) and type(value).__dictoffset__ == 0:
                return  # a plain value
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._add(_of_function(path, value))
        elif isinstance(value, type):
            self._add(_of_class(value))
        elif isinstance(value, types.BuiltinFunctionType):
            self._add([(path, value.__self__)] if not isinstance(value.__self__, types.ModuleType | type) else [])
        elif not isinstance(value, _WITHOUT_STATE) and not _module(type(value)).startswith("torch._"):
            is_whole = self._inside(path, value) or mark is not None or self._is_pythons(type(value))
            self._attributes(path, value)
            is_silent = _module(type(value)).partition(".")[0] in _SILENT and not isinstance(value, _SCRIPTED)
            if not is_whole and not is_silent:
                self._cannot_see(path, value)

    def _inside(self, path: str, value: Any) -> bool:
        """What a container or a callable of Python's own holds; False: it is neither."""
        if isinstance(value, dict | types.MappingProxyType):
            items = list(dict.items(value)) if isinstance(value, dict) else list(value.items())
            self._marks[f"the length of {path}"] = len(items)
            self._add((f"{path}[{_key(key)}]", item) for key, item in items)
        elif isinstance(value, _SEQUENCES):
            ordered = _ordered(value)
            self._marks[f"the length of {path}"] = len(ordered)
            self._add((f"{path}[{number}]", item) for number, item in enumerate(ordered))
        elif isinstance(value, np.ndarray):  # of objects
            self._add((f"{path}[{number}]", item) for number, item in enumerate(value.ravel().tolist()))
        elif isinstance(value, functools.partial):
            self._add([(path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)])
        elif isinstance(value, types.MethodType):
            self._add([(path, value.__func__), (f"{path}.__self__", value.__self__)])
        elif isinstance(value, weakref.ReferenceType):
            self._add([(path, value())])
        elif isinstance(value, contextvars.ContextVar):
            self._add([(path, value.get(None))])
        elif type(value) is _CACHED:  # a pure function, by what its author says
            self._add([(path, value.__wrapped__)])
        elif hasattr(type(value), "__next__"):
            self._iterator(path, value)
        else:
            return False
        return True

    def _iterator(self, path: str, value: Any) -> None:
        if (mark := iterator_mark(value)) is not None:
            self._marks[f"the place of {path}"] = mark
        elif not isinstance(value, types.GeneratorType) and not self._is_pythons(type(value)):
            self._cannot_see(path, value)
        frame = value.gi_frame if isinstance(value, types.GeneratorType) else None
        self._add((f"{path}.{name}", item) for name, item in (dict(frame.f_locals) if frame else {}).items())

    def _cannot_see(self, path: str, value: Any) -> None:
        self._marks[f"the object {path}"] = id(value)
        self._unseen.append(f"{path} (of type {_module(type(value))}.{type(value).__qualname__})")

    def _is_pythons(self, kind: type) -> bool:
        if kind not in self._kinds:
            self._kinds[kind] = _is_pythons(kind)
        return self._kinds[kind]

    def _attributes(self, path: str, value: Any) -> None:
        own = _dict_of(value)
        if isinstance(value, nn.Module):
            self._marks[f"{path}.training"] = own.get("training")
            for place in ("_modules", "_parameters", "_buffers"):
                self._add((f"{path}.{name}", item) for name, item in own.get(place, {}).items())
            own = {name: item for name, item in own.items() if name not in _OF_TORCH and not name.startswith(_OF_FSDP)}
        self._add((f"{path}.{name}", item) for name, item in list(own.items()))
        for kind in type(value).__mro__:
            if is_library(kind.__module__):
                continue
            for name, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType):  # a slot
                    with suppress(AttributeError):
                        self._add([(f"{path}.{name}", member.__get__(value))])
            if id(kind) not in self._seen:
                self._add([(kind.__qualname__, kind)])


def _dict_of(value: Any) -> dict[str, Any]:
    """Its attributes, past any `__getattribute__` of its own; of what each thread has, this thread's."""
    if isinstance(value, threading.local):
        return dict(vars(value))
    with suppress(AttributeError, TypeError):
        found = object.__getattribute__(value, "__dict__")
        return found if isinstance(found, dict) else {}
    return {}


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What it closes over, its defaults, and, where it is the user's, the globals that it reads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # it has no content yet
            yield f"{path}.{name}", cell.cell_contents
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"{path}.__defaults__[{number}]", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"{path}.__kwdefaults__[{name!r}]", value
    for name, value in vars(function).items():
        yield f"{path}.{name}", value
    if is_library(function.__module__):
        return
    names, space = _names(function.__code__), function.__globals__
    for name in sorted(names & space.keys()):
        value = space[name]
        if not isinstance(value, types.ModuleType):
            yield f"{function.__module__}.{name}", value
        elif value is os and names & {"environ", "getenv"}:
            yield "os.environ", inherited_environ()
        elif not is_library(value.__name__):
            inside = vars(value)
            yield from ((f"{value.__name__}.{inner}", inside[inner]) for inner in sorted(names & inside.keys()))


def _names(code: types.CodeType) -> set[str]:
    """Of globals and attributes that the code reads, and the functions that it defines."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    if is_library(kind.__module__):
        return
    for name, member in list(vars(kind).items()):
        path = f"{kind.__module__}.{kind.__qualname__}.{name}"
        if isinstance(member, staticmethod | classmethod):
            yield path, member.__func__
        elif isinstance(member, property):
            yield from ((path, function) for function in (member.fget, member.fset) if function is not None)
        elif isinstance(member, functools.cached_property):
            yield path, member.func
        elif isinstance(member, types.FunctionType) or not name.startswith(("__", "_abc_")):
            yield path, member


def _ordered(value: Any) -> list[Any]:
    items = list(value)
    if isinstance(value, set | frozenset):
        with suppress(TypeError):  # of kinds that cannot be compared
            return sorted(items)
    return items


def _key(key: Any) -> str:
    """A key as it would be written; of one that is no plain value, which object it is."""
    return repr(key) if type(key) in (str, int, float, bool, bytes, type(None)) else f"{type(key).__name__} {id(key)}"


def _module(kind: type) -> str:
    name = getattr(kind, "__module__", "")
    return name if isinstance(name, str) else ""


def is_library(module: str | None) -> bool:
    root = (module or "builtins").partition(".")[0]
    return root in sys.stdlib_module_names or root in _LIBRARIES


def _is_pythons(kind: type) -> bool:
    """Whether its objects hold no more than attributes and slots: nothing in a memory of their own."""
    slots = sum(isinstance(m, types.MemberDescriptorType) for c in kind.__mro__ for m in vars(c).values())
    offsets = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ <= _EMPTY + 8 * (slots + offsets)
