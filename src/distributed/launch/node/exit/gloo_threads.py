"""Before a process group is forgotten, threads of gloo come to rest, which its destructor waits for.

Such a thread takes that lock to free the tensors of its last collective. Where it comes late, because the machine is
busy, a script that calls `destroy_process_group()` and returns from its last function would hang there for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_THREAD = "pt_gloo_runloop"
_POLL_S = 0.001
_LONGEST_S = 2.0
_CALM_POLLS = 3  # in which all of them sleep, while this thread has given the lock away
_C10D = "torch.distributed.distributed_c10d"


class _Groups(dict):  # type: ignore[type-arg]
    """torch's table of process groups, which `destroy_process_group` empties."""

    def clear(self) -> None:
        let_rest()
        super().clear()

    def pop(self, *arguments: Any) -> Any:
        let_rest()
        return super().pop(*arguments)

    def __delitem__(self, group: object) -> None:
        let_rest()
        super().__delitem__(group)


class _OnImport:
    """Finds torch.distributed as Python does, once, and has its table wait when it is loaded."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != _C10D:
            return None
        sys.meta_path.remove(cls)
        found: ModuleSpec | None = PathFinder.find_spec(name, path, target)
        if found is None or found.loader is None:
            return found
        execute = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _have_wait(module)

        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def install() -> None:
    """Have torch's table of groups wait: now, or from when torch.distributed is imported."""
    c10d = sys.modules.get(_C10D)
    if c10d is not None:
        _have_wait(c10d)
    elif _OnImport not in sys.meta_path:
        sys.meta_path.insert(0, _OnImport)


def _have_wait(c10d: ModuleType) -> None:
    groups = getattr(c10d, "_pg_map", None)
    if type(groups) is dict:
        c10d._pg_map = _Groups(groups)  # type: ignore[attr-defined]


def let_rest() -> None:
    """Wait until no thread of gloo has work."""
    deadline, calm = time.monotonic() + _LONGEST_S, 0
    while calm < _CALM_POLLS and time.monotonic() < deadline:
        threads = _states()
        if not threads:
            return
        calm = calm + 1 if set(threads) == {"S"} else 0
        time.sleep(_POLL_S)


def _states() -> list[str]:
    found = []
    for task in Path("/proc/self/task").glob("*/stat") if os.path.isdir("/proc/self/task") else ():
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
            if name == _THREAD:
                found.append(rest.split()[0])
    return found
