"""RunScreen: what a launched run looks like on this terminal: the ranks' lines, and the progress of the run."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

import typer

from distributed.core.events import Event, RankFailed, RunStarted
from distributed.launch.request import LaunchRequest
from distributed.observe.console import Console
from distributed.observe.follow import Follower


class RunScreen:
    """The screen that a job is watched on; decisions that were told before the run are not told again by it."""

    def __init__(self, request: LaunchRequest, *, enabled: bool = True, told: Iterable[str] = ()) -> None:
        self._console = _OnceConsole(set(told), enabled)
        self._follower = Follower(request.run_dir, self._console, request.attempt)

    def rank_line(self, rank: int, text: str) -> None:
        self._console.rank_line(rank, text)

    def refresh(self) -> None:
        self._follower.refresh()

    def stopping(self, number: int) -> None:
        name = signal.Signals(number).name
        typer.echo(f"{name}: the ranks are asked to stop and save; Ctrl-C again ends them at once", err=True)

    def close(self) -> None:
        self._console.close()


class _OnceConsole(Console):
    def __init__(self, told: set[str], enabled: bool) -> None:
        super().__init__(enabled=enabled)
        self._already = told

    def on(self, event: Event) -> None:
        if isinstance(event, RankFailed):  # the launcher's error says it, at the end
            return
        if isinstance(event, RunStarted):
            event = replace(event, decisions=[text for text in event.decisions if text not in self._already])
        super().on(event)
