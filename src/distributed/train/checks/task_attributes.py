"""Attributes of a task that its training step changes: state between steps, which no checkpoint holds by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from distributed.core.errors import TaskError
from distributed.train.checks.reachable import changes, look

_CALLS = 3  # of training steps; the first may make what it keeps from then on


class AttributeWatch:
    """Compares the attributes before and after the first calls of a task that says nothing of its state."""

    def __init__(self) -> None:
        self._calls = 0

    @property
    def is_done(self) -> bool:
        return self._calls >= _CALLS

    @contextmanager
    def watching(self, attributes: Callable[[], Mapping[str, Any]], model: nn.Module) -> Iterator[None]:
        """Around a call of the training step; raises where it changes something that is the task's alone."""
        self._calls += 1
        if self._calls == 1:
            yield
            return
        known = [*model.parameters(), *model.buffers()]
        before = look({"task": attributes()}, known)
        yield
        moved = changes(before, look({"task": attributes()}, known))
        if moved:
            raise TaskError(
                f"the training step changes what the task keeps between steps: {moved[0]}",
                why="no checkpoint holds it, so a run that resumes, or a rank that takes another one's place, would "
                "begin with another value",
                do="return it from the task's state(), and take it in load_state(); {} says that it need not be kept",
            )


@contextmanager
def restored(task: Any, attributes: Callable[[], Mapping[str, Any]], shared: Iterable[object]) -> Iterator[bool]:
    """A scope after which the attributes are as before, but for modules; whether that can be. `shared`: not copied."""
    own = {name: value for name, value in attributes().items() if not isinstance(value, nn.Module)}
    try:
        copies = copy.deepcopy(own, {id(part): part for part in shared})
    except Exception:  # noqa: BLE001 - objects of the user's may do anything when they are copied
        yield False
        return
    vars(task).update(copies)
    try:
        yield True
    finally:
        for name in attributes().keys() - own.keys():
            if not isinstance(vars(task)[name], nn.Module):
                delattr(task, name)
        vars(task).update(own)
