"""Watchers: rank 0's observers and its screen, which live as long as its process."""

from __future__ import annotations

from distributed.core.env import WorkerEnv
from distributed.core.plan import Plan
from distributed.observe.live import RunScreen, Ticker
from distributed.observe.observers import Observers, observers_for


class Watchers:
    """Of one rank. A world that breaks is part of one and the same run, so the next one has the same observers."""

    def __init__(self, shows_progress: bool) -> None:
        self._shows_progress = shows_progress
        self._observer: Observers | None = None
        self._ticker: Ticker | None = None

    def observer(self, plan: Plan, env: WorkerEnv) -> Observers | None:
        """None on other ranks than rank 0."""
        if not env.is_main:
            return None
        if self._observer is None:
            self._observer = Observers(observers_for(plan))
            if self._shows_progress:
                self._ticker = Ticker(RunScreen(plan.run_dir, env.attempt))
        return self._observer

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()
        if self._ticker is not None:
            self._ticker.close()
