"""A parameter that train_fn never reads is a mistake: every trial would be the same in it. Found out at the first end.

Some parameters are read only in some trials (momentum, where the optimizer is SGD). So a name that stands somewhere in
the function's code is given until the end of the search.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

from distributed.core.errors import Problem, TaskError
from distributed.core.registry import nearest
from distributed.tune.results.results import ALIASES

_DEEPEST = 4  # calls within the module that are followed


class ReadCheck:
    """Collects which parameters are read, and raises once a trial has ended and some were never read."""

    def __init__(self, names: Iterable[str], train_fn: Callable[..., Any]) -> None:
        self._names = frozenset(names)
        self._mentioned = mentioned_texts(train_fn)
        self._read: set[str] = set()
        self._aliases = ALIASES if hasattr(train_fn, "script") else {}  # its Trainer reads settings by their names
        self._what = getattr(train_fn, "name", "") or getattr(train_fn, "__name__", "") or type(train_fn).__name__

    def read(self, names: Iterable[str]) -> None:
        self._read |= set(names)
        self._read |= {alias for alias, setting in self._aliases.items() if setting in self._read}

    def trial_finished(self) -> None:
        """One ran to its end without failing."""
        unread = sorted(self._names - self._read - self._mentioned)
        if unread:
            raise TaskError([self._problem(name) for name in unread])

    def never_read(self) -> list[str]:
        """At the end of the search."""
        return sorted(self._names - self._read)

    def _problem(self, name: str) -> Problem:
        others = sorted(self._read - self._names) or sorted(self._read)
        close = nearest(name, others, most=1)
        reads = f"it reads {', '.join(sorted(self._read))}" if self._read else "it reads none of its parameters"
        do = f"did you mean {close[0]}?" if close else f"read it: config[{name!r}], or leave it out of the search space"
        return Problem(f"the search space has {name}, which {self._what} never reads", why=reads, do=do)


def mentioned_texts(train_fn: Any) -> frozenset[str]:
    """The texts that stand in a function's code, and in that of the functions of its module that it uses."""
    script = getattr(train_fn, "script", None)
    if script is not None:
        with open(script, "rb") as file:
            source = file.read()
        try:
            return frozenset(_texts_of(compile(source, script, "exec")))
        except (SyntaxError, ValueError):  # the trial says so
            return frozenset()
    found: set[str] = set()
    _gather(train_fn, found, set(), 0)
    return frozenset(found)


def _gather(value: Any, found: set[str], seen: set[int], depth: int) -> None:
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    parts: list[Any]
    if inspect.isclass(value):
        parts = [part for part in vars(value).values() if isinstance(part, FunctionType)]
    elif isinstance(value, FunctionType):
        parts = [value]
    else:  # a bound method, a partial, an object that can be called
        inner = getattr(value, "__func__", None) or getattr(value, "func", None)
        parts = [inner or getattr(type(value), "__call__", None)]  # noqa: B004
    for part in parts:
        if not isinstance(part, FunctionType):
            continue
        found.update(_texts_of(part.__code__))
        cells = [cell.cell_contents for cell in part.__closure__ or () if _is_filled(cell)]
        used = [part.__globals__.get(name) for name in _names_of(part.__code__)]
        for other in (*cells, *used):
            is_code = inspect.isclass(other) or isinstance(other, FunctionType)
            if is_code and getattr(other, "__module__", None) == part.__module__:
                _gather(other, found, seen, depth + 1)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _texts_of(code: CodeType) -> set[str]:
    texts: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, str):
            texts.add(constant)
        elif isinstance(constant, tuple | frozenset):
            texts |= {part for part in constant if isinstance(part, str)}
        elif isinstance(constant, CodeType):
            texts |= _texts_of(constant)
    return texts


def _names_of(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_of(part) for part in code.co_consts if isinstance(part, CodeType)))
