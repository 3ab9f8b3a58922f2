"""LocalJob: the ranks of this node while they run. It shows what they say, and ends all of them when one fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from distributed.core.errors import RankFailedError
from distributed.core.events import RankFailed
from distributed.core.failure import FailureRecord, failure_path
from distributed.launch.blame import Ending, describe, failure_error, first_failure
from distributed.launch.logtail import LogTail, crash_dump
from distributed.launch.peers import News, Peers
from distributed.launch.processes import RankProcess, end_all
from distributed.launch.request import Rendered
from distributed.launch.stops import Stopped, Stops

_REFRESH_S = 0.1
_NOTICE_S = 0.2  # a death without a word happened up to this long before it is noticed
_EXIT_GRACE_S = 5.0  # from a rank's failure file to its end; then it hangs in its own clean-up
_ROOT_CAUSE_GRACE_S = 0.5  # for failures at nearly the same time
_COLLATERAL_GRACE_S = 4.0  # when only broken connections are known: somebody must have broken them
_TERMINATE_GRACE_S = 2.0


class Screen(Protocol):
    """Whatever shows a run to the user."""

    def rank_line(self, rank: int, text: str) -> None: ...

    def refresh(self) -> None: ...


class LocalJob:
    """Started ranks. `wait` returns when all ended well, and never leaves a process behind.

    Use it as a context manager, so that nothing is left either when `wait` is never reached.
    """

    def __init__(self, rendered: Rendered, processes: Sequence[RankProcess], interrupt_grace_s: float) -> None:
        self.rendered = rendered
        self._processes = tuple(processes)
        self._interrupt_grace_s = interrupt_grace_s
        self._endings: dict[int, Ending] = {}
        self._failing_since: dict[int, float] = {}

    @property
    def pids(self) -> dict[int, int]:
        return {process.rank: process.pid for process in self._processes}

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_all(self._processes, _TERMINATE_GRACE_S if error is None else 0.0)

    def wait(
        self,
        screen: Screen | None = None,
        *,
        peers: Peers | None = None,
        on_stop: Callable[[int], None] | None = None,
        poll_s: float = 0.05,
    ) -> None:
        """Until every rank ended. `on_stop` is called with the signal when the ranks were asked to stop.

        Raises RankFailedError for the first rank that failed, and Stopped (a KeyboardInterrupt) when the run was
        stopped from outside and the ranks ended as asked.
        """
        echo = _Echo(self._processes, screen)
        ok = False
        try:
            with Stops(on_stop) as stops:
                self._watch(echo, stops, peers, poll_s)
                end_all(self._processes, _TERMINATE_GRACE_S)
            failure = self._failure(stops.number)
            if failure is not None:
                echo.finish(only=failure.rank)  # before the failure is an event: the error raised here says it
                raise self._fail(failure, peers)
            echo.finish()
            ok = stops.count <= 1  # a stop in good order: other nodes may still be saving
            if stops.number is not None:
                raise Stopped(stops.number)
        finally:
            end_all(self._processes, 0.0)
            echo.close()
            late_news = peers.leave(ok) if peers is not None else None
        if late_news is not None:
            raise _failed_elsewhere(late_news)

    def _watch(self, echo: _Echo, stops: Stops, peers: Peers | None, poll_s: float) -> None:
        """Until all have ended, or there is a reason to end those that have not."""
        answered = 0  # requests to stop that were passed on
        give_up_at = float("inf")
        failed_at: float | None = None
        while True:
            self._notice()
            if stops.count > answered:
                give_up_at = self._stop(stops, answered, give_up_at, peers)
                answered = stops.count
            failure = self._failure(stops.number)
            if failure is None:
                echo.drain()
            elif failed_at is None:
                failed_at = time.monotonic()
                echo.drain()  # what was said up to now; later noise of the survivors stays in their logs
            waits_for_news = peers is not None and failure is not None and failure.is_collateral
            if len(self._endings) == len(self._processes) and not waits_for_news:
                return
            if time.monotonic() > give_up_at:
                return
            if failure is not None and failed_at is not None:
                grace = _COLLATERAL_GRACE_S if failure.is_collateral else _ROOT_CAUSE_GRACE_S
                if time.monotonic() > failed_at + grace:
                    return
            news = peers.news() if peers is not None else None
            if news is not None and news.kind == "failed" and (failure is None or failure.is_collateral):
                end_all(self._processes, _TERMINATE_GRACE_S)
                raise _failed_elsewhere(news)
            if news is not None and news.kind == "stopping" and not stops.count:
                stops.request(news.signal)
            echo.refresh()
            time.sleep(poll_s)

    def _stop(self, stops: Stops, answered: int, give_up_at: float, peers: Peers | None) -> float:
        """Pass the first request on to the ranks, which may want to save; the second ends them. Until when to wait."""
        assert stops.number is not None
        if answered or stops.count > 1:
            for process in self._processes:
                process.end(signal.SIGKILL)
            return time.monotonic()
        for process in self._processes:
            process.signal(stops.number)
        stops.announce()
        if peers is not None:
            peers.tell(News(self.rendered.node_rank, socket.gethostname(), "stopping", signal=stops.number))
        return time.monotonic() + self._interrupt_grace_s

    def _notice(self) -> None:
        """Write down who has ended, and whoever said that it failed but does not come to an end."""
        for process in self._processes:
            code = process.poll()
            if process.rank in self._endings:
                continue
            if code is not None:
                self._endings[process.rank] = self._ending(process, code)
            elif self._hangs_after_failure(process):
                process.end(signal.SIGKILL)
                record = FailureRecord.read(failure_path(self.rendered.attempt_dir, process.rank))
                assert record is not None
                self._endings[process.rank] = Ending(
                    process.rank, record.exit_code, record.time, process.log_path, record
                )

    def _ending(self, process: RankProcess, code: int) -> Ending:
        record = FailureRecord.read(failure_path(self.rendered.attempt_dir, process.rank)) if code else None
        when = record.time if record else time.time() - _NOTICE_S
        return Ending(process.rank, code, when, process.log_path, record, process.ended_by_us)

    def _hangs_after_failure(self, process: RankProcess) -> bool:
        if not failure_path(self.rendered.attempt_dir, process.rank).exists():
            return False
        since = self._failing_since.setdefault(process.rank, time.monotonic())
        return time.monotonic() - since > _EXIT_GRACE_S

    def _failure(self, stopping_with: int | None) -> Ending | None:
        return first_failure(ending for ending in self._endings.values() if not ending.is_benign(stopping_with))

    def _fail(self, failure: Ending, peers: Peers | None) -> RankFailedError:
        """Make the failure known: to the other nodes, to whoever follows the events, to the caller."""
        host = failure.record.host if failure.record else socket.gethostname()
        message = describe(failure)
        if peers is not None:
            code = failure.record.exit_code if failure.record else 1
            place = self.rendered.node_rank
            peers.tell(News(place, host, "failed", message, failure.rank, failure.log_path, code))
        event = RankFailed(time=failure.time, rank=failure.rank, host=host, message=message, log_path=failure.log_path)
        append_line(self.rendered.events_path, event.to_json())
        return failure_error(failure, host, crash_dump(failure.log_path))


class _Echo:
    """The ranks' logs on the screen."""

    def __init__(self, processes: Sequence[RankProcess], screen: Screen | None) -> None:
        self._screen = screen
        self._tails = {process.rank: LogTail(process.log_path) for process in processes} if screen else {}
        self._refreshed_at = 0.0

    def drain(self, only: int | None = None, final: bool = False) -> None:
        for rank, tail in self._tails.items():
            if self._screen is not None and only in (None, rank):
                for line in tail.lines(final):
                    self._screen.rank_line(rank, line)

    def refresh(self) -> None:
        if self._screen is not None and time.monotonic() >= self._refreshed_at + _REFRESH_S:
            self._refreshed_at = time.monotonic()
            self._screen.refresh()

    def finish(self, only: int | None = None) -> None:
        """Show the rest, of all ranks or of the one that matters; what a rank said last came after its events."""
        if self._screen is not None:
            self._screen.refresh()
        self.drain(only, final=True)
        if self._screen is not None:
            self._screen.refresh()

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


def _failed_elsewhere(news: News) -> RankFailedError:
    who = f"node {news.node_rank} ({news.host})" if news.node_rank >= 0 else "the meeting of the nodes"
    who += f", rank {news.rank}" if news.rank >= 0 else ""
    return RankFailedError(
        f"{who} failed: {news.message}",
        why="a run ends on all nodes when it fails on one; the ranks of this node were ended",
        do=f"look at {news.log_path} on {news.host}" if news.log_path else "",
        rank=news.rank,
        log_path=news.log_path,
        exit_code=news.exit_code,
    )


def append_line(path: Path, line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)
