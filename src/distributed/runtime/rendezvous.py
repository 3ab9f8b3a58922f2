"""Rendezvous of the ranks of a world: from the environment, or from their launcher."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from distributed.core.engines.launchers import launcher_of
from distributed.core.env import WorkerEnv
from distributed.core.registry import load_target


@dataclass(frozen=True)
class Rendezvous:
    """A world with the address of its rendezvous; rank 0 already listens there."""

    env: WorkerEnv
    listener: socket.socket | None = None


def find_rendezvous(env: WorkerEnv, run_dir: str, timeout_s: float) -> Rendezvous:
    """The rendezvous of this world's ranks."""
    meets = launcher_of(env.launcher).meets
    rendezvous: Rendezvous = load_target(meets)(env, run_dir, timeout_s) if meets else Rendezvous(env)
    return rendezvous
