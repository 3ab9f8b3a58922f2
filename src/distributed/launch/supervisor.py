"""Supervisor: a run on this node, from its first world to its last.

It starts the ranks and watches them; when something breaks it asks the policy what to do, and makes the next world of
those who are left and those who come. Every state says what may follow it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from distributed.core.config import DistributedConfig
from distributed.core.control import Leave
from distributed.core.errors import RankFailedError
from distributed.core.events import AttemptEnded, Event, RankFailed
from distributed.core.private_files import FILE_MODE
from distributed.core.run_files import HISTORY
from distributed.launch.blame import failure_error
from distributed.launch.crew import Crew
from distributed.launch.echo import Echo
from distributed.launch.logtail import crash_dump
from distributed.launch.nodes import News, Nodes, Round, RunOver, StoppedWaiting
from distributed.launch.policy import Fault, GiveUp, Shrink, decide
from distributed.launch.report import RunReport
from distributed.launch.request import LaunchRequest, Rendered
from distributed.launch.stops import Stopped, Stops
from distributed.launch.watch import Asked, Broken, Drained, Ended, Outcome, Watch

_TERMINATE_GRACE_S = 2.0
_WISH_EVERY_S = 0.5
_SETTLE_S = 30.0  # for a world that is being made, before it is stopped all the same
RESIZE_FILE = "resize.json"  # in the run directory: the number of ranks that somebody wants instead


class State(Enum):
    STARTING = "starting"  # ranks are started or told their world, and meet
    RUNNING = "running"
    DRAINING = "draining"  # the ranks leave at a step that all agree on
    RESTARTING = "restarting"  # something broke; those who are left meet again
    RESIZING = "resizing"  # the ranks have left in order; the nodes meet again
    DONE = "done"
    GIVEN_UP = "given up"


FOLLOWS: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.RUNNING, State.RESTARTING, State.DONE, State.GIVEN_UP}),
    State.RUNNING: frozenset({State.DRAINING, State.RESTARTING, State.DONE, State.GIVEN_UP}),
    State.DRAINING: frozenset({State.RESIZING, State.RESTARTING, State.DONE, State.GIVEN_UP}),
    State.RESTARTING: frozenset({State.STARTING, State.GIVEN_UP}),
    State.RESIZING: frozenset({State.STARTING, State.GIVEN_UP}),
    State.DONE: frozenset({State.RESTARTING, State.GIVEN_UP}),  # a rank of another node failed at the very end
    State.GIVEN_UP: frozenset(),
}


@dataclass(frozen=True)
class Patience:
    """What a run may survive, and how long things may take."""

    max_restarts: int | None = 0  # None: the policy's default
    min_gpus: int | None = None  # None: all
    hang_timeout_s: float | None = None  # None: from the steps that were measured
    interrupt_grace_s: float = 300.0  # from the first Ctrl-C to SIGKILL: a few steps and a save

    @staticmethod
    def of(config: DistributedConfig) -> Patience:
        return Patience(config.max_restarts, config.min_gpus, config.hang_timeout_s)


@dataclass
class Supervisor:
    """`start` it, then `wait`, which returns when the run is done and raises when it failed or was stopped."""

    request: LaunchRequest
    nodes: Nodes
    crew: Crew
    render: Callable[[Round, Sequence[int]], Rendered]  # the ranks of this node in a round, on these of its slots
    echo: Echo
    patience: Patience = field(default_factory=Patience)
    on_stop: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.state = State.STARTING
        self.report = RunReport()
        self._faults: list[Fault] = []
        self._slots = list(range(self.request.ranks_per_node))
        self._worlds, self._reached = 0, 0
        self._uses_trainer = False  # some rank came to our loop
        self._answered, self._asked_at, self._give_up_at = 0, 0.0, float("inf")  # of requests to stop
        self._sizes: list[int] = []  # that are legal for this run, once a rank has told
        self._wish_at = 0.0
        self._stops = Stops(self.on_stop)

    def start(self, first: Round | None = None) -> None:
        """The first world; `first` is where the nodes have met already. Whoever calls this waits or closes then."""
        Path(self.request.run_dir, RESIZE_FILE).unlink(missing_ok=True)  # what an earlier run was asked for
        self._watch = self._begin(first or self.nodes.gather(self.request.attempt))

    def wait(self) -> None:
        """Until the run is done. Raises RankFailedError for the rank that it failed of, and Stopped (a
        KeyboardInterrupt) when it was stopped from outside and the ranks ended as asked."""
        ok, stops = False, self._stops
        with stops:
            try:
                while self.state is not State.DONE:
                    outcome = self._watch.until_it_ends(self._answer)
                    self._reached = self._watch.step
                    self._watch = self._next(outcome, self._watch)
                self.crew.end(_TERMINATE_GRACE_S)
                self.echo.finish()
                ok = self._stops.count <= 1  # a stop in good order: other nodes may still be saving
            finally:
                self.close()
                if not ok or self._stops.count:
                    self.nodes.leave(ok)
                self._tell_report(ok)
        if self._stops.number is not None:
            raise Stopped(self._stops.number)

    def close(self) -> None:
        """End whatever runs, at once."""
        self.crew.close()
        self.echo.close()
        self.nodes.close()

    def _next(self, outcome: Outcome, watch: Watch) -> Watch:
        """What follows a world, or what goes on in it."""
        self._sizes = next((m.joined.sizes for m in self.crew.members if m.joined and m.joined.sizes), self._sizes)
        if self.state is State.STARTING and watch.is_running:
            self._go(State.RUNNING)
        if isinstance(outcome, Asked):
            self._go(State.DRAINING)
            self._drain(outcome, watch)
            return watch
        if isinstance(outcome, Ended):
            late = None if self._answered else self.nodes.leave(True, is_stopped=lambda: self._stops.count > 0)
            self._go(State.DONE)
            if late is None:
                return watch
            outcome = Broken(Fault("machine", late.rank, late.host, self._reached, late.message), news=late)
        watch.close()
        if isinstance(outcome, Drained):
            self._go(State.RESIZING)
            host, step = socket.gethostname(), self._reached
            return self._regroup(Fault("resize", -1, host, step, "another number of ranks"), watch)
        self._decide(outcome, watch)
        self._go(State.RESTARTING)
        return self._regroup(outcome.fault, watch)

    def _go(self, state: State) -> None:
        assert state in FOLLOWS[self.state], f"{self.state.value} is not followed by {state.value}"
        self.state = state

    def _begin(self, round_: Round, broke_at: float | None = None) -> Watch:
        """Start the ranks of a world that are not there, and tell it to those who are."""
        rendered = self.render(round_, self._slots)
        self._events, self._outcome = rendered.events_path, Path(rendered.run_dir, HISTORY)
        self._is_first = round_.place.node_rank == 0
        self._worlds += 1
        self.report.attempt_began(round_.attempt, time.monotonic())
        self.crew.begin(rendered, self._slots)
        self.echo.attempt_began(round_.attempt)
        return Watch(
            round_,
            self.crew,
            self.nodes,
            self.echo,
            self._stops,
            self.report,
            self._emit,
            self.patience.hang_timeout_s,
            self._reached,
            broke_at,
            self._wish,
            lambda: self._stops.number if self._answered else None,
        )

    def _drain(self, asked: Asked, watch: Watch) -> None:
        """All ranks of all nodes leave at one step."""
        if asked.news is None:
            place = watch.round.place
            self.nodes.tell(News(place.node_rank, socket.gethostname(), "regroup", asked.why, cause="resize"))
        self.crew.tell(Leave(watch.round.attempt, in_order=True))
        watch.drain()

    def _decide(self, broken: Broken, watch: Watch) -> None:
        """Whether the run goes on after a fault; raises if not. What breaks while a run is stopped ends it, unless the
        ranks that are left can save what they hold in another world."""
        fault, news = broken.fault, broken.news
        if news is not None and news.kind == "failed":
            self._give_up(_failed_elsewhere(news))
        if self._answered:
            if not self._can_save_later(fault):
                self._give_up(self._failed(broken, ""))
            self._answered = 0  # the next world is asked to stop when it can
        if news is not None and news.kind == "regroup":  # whoever told it has decided
            return
        self._faults.append(fault)
        # Also when those who did are gone, and those who came in their place did not get so far.
        self._uses_trainer |= any(member.joined is not None for member in self.crew.members)
        verdict = decide(
            self._faults,
            reached=self._reached,
            max_restarts=self.patience.max_restarts,
            uses_trainer=self._uses_trainer,
            min_gpus=self.patience.min_gpus or self.request.ranks_per_node,
            gpus=len(self._slots),
        )
        place = watch.round.place
        if isinstance(verdict, GiveUp):
            error = self._failed(broken, verdict.reason)
            log_path = broken.ending.log_path if broken.ending is not None else ""
            self.nodes.tell(
                News(place.node_rank, fault.host, "failed", fault.message, fault.rank, log_path, error.exit_code)
            )
            self._give_up(error)
        if isinstance(verdict, Shrink):
            self._slots.remove(verdict.slot)
        if news is None:
            message = f"rank {fault.rank}: {fault.message}"
            self.nodes.tell(News(place.node_rank, fault.host, "regroup", message, fault.rank, cause=fault.kind))

    def _can_save_later(self, fault: Fault) -> bool:
        """A rank died at nearly the time of the signal. Other nodes do not follow a run that stops into a new world."""
        is_in_time = self._stops.count == 1 and time.monotonic() < self._asked_at + _SETTLE_S
        can_go_on = self.request.most_nodes == 1 and any(member.can_go_on for member in self.crew.members)
        return is_in_time and can_go_on and fault.kind == "machine"

    def _regroup(self, fault: Fault, watch: Watch) -> Watch:
        """The next world."""
        attempt, broke_at = watch.round.attempt, watch.last_step_at()
        self.report.fault(broke_at, fault)
        if fault.kind == "resize":
            self._take_wish()
        self.crew.tell(Leave(attempt, in_order=False))
        was_first = watch.round.place.node_rank == 0
        if was_first:  # one node tells what all know, before it may have to wait for another
            self._tell_end(fault, attempt)
        round_ = self._gather(attempt + 1)
        if round_.place.node_rank == 0 and not was_first:  # the one that would have told is gone
            self._tell_end(fault, attempt)
        watch = self._begin(round_, broke_at)
        self._go(State.STARTING)
        return watch

    def _gather(self, attempt: int) -> Round:
        """Meet the other nodes again, unless the user, or the end of the run on other nodes, makes that moot."""
        begun = time.time()

        def is_over() -> bool:
            return self.request.most_nodes > 1 and _was_written_since(self._outcome, begun)

        try:
            return self.nodes.gather(
                attempt, self._sizes, ranks=len(self._slots), is_stopped=lambda: self._stops.count > 0 or is_over()
            )
        except StoppedWaiting:
            self._go(State.GIVEN_UP)
            if self._stops.number is None:
                raise RunOver(News(-1, "", "done")) from None
            raise Stopped(self._stops.number) from None

    def _tell_end(self, fault: Fault, attempt: int) -> None:
        self._emit(
            AttemptEnded(
                time=time.time(),
                attempt=attempt,
                cause=fault.kind,
                message=fault.message,
                rank=fault.rank,
                host=fault.host,
                step=fault.step,
            )
        )
        self.echo.refresh()

    def _give_up(self, error: RankFailedError) -> None:
        self._go(State.GIVEN_UP)
        self.crew.end(_TERMINATE_GRACE_S)
        raise error

    def _failed(self, broken: Broken, reason: str) -> RankFailedError:
        """Make the failure known: to whoever follows the events, and as the one error that the user sees."""
        fault, ending = broken.fault, broken.ending
        path = ending.log_path if ending is not None else ""
        self.echo.finish(only=path)  # before the failure is an event: the error raised here says it
        failed = RankFailed(time=time.time(), rank=fault.rank, host=fault.host, message=fault.message, log_path=path)
        self._emit(failed)
        why = reason if self._worlds > 1 else ""
        if ending is None:
            return RankFailedError(f"rank {fault.rank} (on {fault.host}) failed: {fault.message}", why=why)
        crash = crash_dump(ending.log_path)
        return failure_error(ending, fault.host, crash, message=fault.message, why=why)

    def _answer(self) -> None:
        """Pass the first request to stop on to the ranks, which may want to save; the second ends them."""
        requests = self._stops.count  # a second one may come at any moment from here on
        if requests > self._answered:
            self._asked_at = self._asked_at or time.monotonic()
            assert self._stops.number is not None
            if self._answered or requests > 1:
                self.crew.end(0.0)
            elif not self._watch.is_settled and time.monotonic() < self._asked_at + _SETTLE_S:
                return  # ranks between two worlds could not save
            else:
                for member in self.crew.members:
                    if not member.role.serves:  # those who save need it until they have
                        member.process.signal(self._stops.number)
                self._stops.announce()
                self.nodes.tell(News(-1, socket.gethostname(), "stopping", signal=self._stops.number))
                self._give_up_at = time.monotonic() + self.patience.interrupt_grace_s
            self._answered = requests
        if time.monotonic() > self._give_up_at:
            self.crew.end(0.0)

    def _wish(self) -> str:
        """Why the user wants this world to end, if so; looked up now and then."""
        if self.request.num_nodes > 1 or time.monotonic() < self._wish_at:
            return ""
        self._wish_at = time.monotonic() + _WISH_EVERY_S
        wanted = read_wish(self.request.run_dir)
        return "" if wanted in (None, len(self._slots)) else f"{wanted} ranks were asked for"

    def _take_wish(self) -> None:
        wanted = read_wish(self.request.run_dir) if self.request.num_nodes == 1 else None
        if wanted is not None:
            self._slots = list(range(wanted))
            Path(self.request.run_dir, RESIZE_FILE).unlink(missing_ok=True)

    def _tell_report(self, ok: bool) -> None:
        if self._worlds > 1 and self._is_first:
            status = ("stopped" if self._stops.count else "done") if ok else "failed"
            self.report.ended(time.monotonic(), status, self._reached)
            self._emit(self.report.event(time.time()))

    def _emit(self, event: Event) -> None:
        append_line(self._events, event.to_json())


def ask_for_ranks(run_dir: str, ranks: int) -> None:
    """Want a run on this machine to go on with another number of ranks. Its launcher looks for this now and then."""
    path = Path(run_dir, RESIZE_FILE)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"ranks": ranks}) + "\n")
    os.replace(partial, path)


def read_wish(run_dir: str) -> int | None:
    """The number of ranks that somebody wants a run to have from now on."""
    try:
        return int(json.loads(Path(run_dir, RESIZE_FILE).read_text())["ranks"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _was_written_since(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime > moment
    except OSError:
        return False


def append_line(path: Path, line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def _failed_elsewhere(news: News) -> RankFailedError:
    who = f"node {news.node_rank} ({news.host})" if news.node_rank >= 0 else "the meeting of the nodes"
    who += f", rank {news.rank}" if news.rank >= 0 else ""
    return RankFailedError(
        f"{who} failed: {news.message}",
        why="a run ends on all nodes when it is given up on one; the ranks of this node were ended",
        do=f"look at {news.log_path} on {news.host}" if news.log_path else "",
        rank=news.rank,
        log_path=news.log_path,
        exit_code=news.exit_code,
    )
