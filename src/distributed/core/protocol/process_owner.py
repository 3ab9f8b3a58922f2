"""Hosts: who owns the process that a rank lives in, where that is not the rank itself.

A host learns what a run reports, from every rank and at the same points on all of them, and may ask it to stop: both
without a signal, which only a process's own main thread hears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from distributed.core.engines.launchers import launcher_of
from distributed.core.env import WorkerEnv
from distributed.core.registry import load_target


class ProcessOwner(Protocol):
    """What a rank says to its host, and hears from it."""

    def on_stop(self, stop: Callable[[int], None]) -> None:
        """Set the function to call, from any thread, with the signal of a request to stop."""

    def resumed(self, step: int, source: str) -> None:
        """The state that this world resumes from; reported by rank 0."""

    def report(self, metrics: Mapping[str, float], checkpoint: str) -> None:
        """What the run has come to: every rank calls this at the same points. It returns at once."""

    def close(self) -> None:
        """Returns when everything that was reported is known."""


class OwnProcess:
    """A rank that is its own process."""

    def on_stop(self, stop: Callable[[int], None]) -> None:
        pass

    def resumed(self, step: int, source: str) -> None:
        pass

    def report(self, metrics: Mapping[str, float], checkpoint: str) -> None:
        pass

    def close(self) -> None:
        pass


def process_owner_of(env: WorkerEnv) -> ProcessOwner:
    """The host of this rank."""
    owns = launcher_of(env.launcher).owns
    owner: ProcessOwner = load_target(owns)(env) if owns else OwnProcess()
    return owner
