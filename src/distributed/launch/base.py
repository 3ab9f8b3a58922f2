"""Launcher: what starts the ranks of a run and watches them, on this machine or on a cluster.

    LaunchRequest ──render──▶ Rendered: commands as text; nothing is started
          └───────submit───▶ JobHandle ──wait──▶ returns, or raises the first failure or the stop

A launcher restarts ranks after a fault, so the request is submitted, and not the commands of one world.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, cast

from distributed.core.engines.engine import Engine
from distributed.core.registry import load_target
from distributed.launch.node.log_mirror import MirrorScreen
from distributed.launch.request import LaunchRequest, Rendered
from distributed.launch.supervise.restart_limits import RestartLimits


class JobHandle(Protocol):
    """A run whose ranks were started. Its holder must call `wait` or `close`."""

    def wait(self) -> None:
        """Wait until the run is done.

        Raises RankFailedError for the rank that failed first, and Stopped (a KeyboardInterrupt) if the run was stopped
        by a signal and its ranks ended in order.
        """

    def close(self) -> None:
        """End the run at once, without a result."""


class Launcher(Protocol):
    """Starts and supervises ranks; an engine's declaration names its launcher, which is made without arguments."""

    def render(self, request: LaunchRequest, limits: RestartLimits) -> Rendered:
        """The exact commands of a run as text, for a dry run. Pure: equal requests have equal texts."""

    def reserve(self, ranks: int, device: str) -> AbstractContextManager[object]:
        """Resources that concurrent jobs of this process share, for that many ranks in total."""

    def submit(
        self,
        request: LaunchRequest,
        screen: MirrorScreen | None = None,
        *,
        limits: RestartLimits | None = None,
        on_stop: Callable[[int], None] | None = None,
    ) -> JobHandle:
        """Start the ranks, which end with this process. `on_stop` is called with each stop signal."""

    def run(
        self,
        request: LaunchRequest,
        screen: MirrorScreen | None = None,
        *,
        limits: RestartLimits | None = None,
        on_stop: Callable[[int], None] | None = None,
    ) -> None:
        """Submit and wait, forwarding this process's signals to the ranks."""


def launcher_of(engine: Engine) -> Launcher:
    return cast(Launcher, load_target(engine.starts)())
