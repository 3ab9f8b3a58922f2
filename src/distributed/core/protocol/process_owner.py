"""Hosts: who owns the process that a rank lives in, where that is not the rank itself.

A host learns what a run reports, from every rank and at the same points on all of them, and may ask it to stop: both
without a signal, which only a process's own main thread hears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from distributed.core.env import WorkerEnv
from distributed.core.registry import load_target


class Host(Protocol):
    """What a rank says to its host, and hears from it."""

    def on_stop(self, stop: Callable[[int], None]) -> None:
        """Whom to call, from any thread, with the signal by which somebody asked the run to stop."""

    def resumed(self, step: int, source: str) -> None:
        """The state that this world goes on from; told by rank 0."""

    def report(self, metrics: Mapping[str, float], checkpoint: str) -> None:
        """What the run has come to: every rank calls this at the same points. It returns at once."""

    def close(self) -> None:
        """Returns when everything that was reported is known."""


class NoHost:
    """A rank that is its own process."""

    def on_stop(self, stop: Callable[[int], None]) -> None:
        pass

    def resumed(self, step: int, source: str) -> None:
        pass

    def report(self, metrics: Mapping[str, float], checkpoint: str) -> None:
        pass

    def close(self) -> None:
        pass


_HOSTS = {"ray": "distributed.runtime.ray_host:RayHost"}  # by the launcher that names itself in the environment


def host_of(env: WorkerEnv) -> Host:
    """The host of this rank."""
    host: Host = load_target(_HOSTS[env.launcher])(env) if env.launcher in _HOSTS else NoHost()
    return host
