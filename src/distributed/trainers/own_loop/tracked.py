"""Tracked objects: the user's own, saved in checkpoints and taken back at a resume."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from distributed.core.errors import TaskError
from distributed.train.callbacks.callback import Callback, TrainingControl


class Stateful(Protocol):
    """What can be saved: schedulers, samplers, counters of the user's own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Tracked(Callback):
    """The objects of one run, by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._saved: set[str] = set()  # the names of the checkpoint that the run resumes from

    def add(self, name: str, found: Any) -> None:
        if not (hasattr(found, "state_dict") and hasattr(found, "load_state_dict")):
            raise TaskError(
                f"track({name}=…) got a {type(found).__name__}",
                why="a checkpoint keeps what state_dict() returns, and load_state_dict takes it back",
                do=f"give {type(found).__name__} these two methods",
            )
        if name in self._objects:
            raise TaskError(
                f"{name} is tracked twice",
                why="a checkpoint keeps one state by each name",
                do="track it by another name",
            )
        self._objects[name] = found

    def state(self) -> dict[str, Any]:
        return {name: found.state_dict() for name, found in self._objects.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._saved = set(state)
        for name, found in self._objects.items():
            if name in state:
                found.load_state_dict(state[name])

    def on_load(self, run: TrainingControl) -> None:
        """Warn of objects without a saved state, and of states without an object."""
        if run.rank:
            return
        if new := sorted(self._objects.keys() - self._saved):
            warnings.warn(f"the checkpoint has no state of {', '.join(new)}, which begins from its start", stacklevel=2)
        if lost := sorted(self._saved - self._objects.keys()):
            warnings.warn(f"the checkpoint has the state of {', '.join(lost)}, which is not tracked now", stacklevel=2)
