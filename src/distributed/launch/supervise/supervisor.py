"""Supervisor: a run on this node, from its first world to its last.

It starts the ranks and watches them; after a fault the policy decides, and the next world is formed of the surviving
and the new ranks. Its states and transitions are in `states`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed.core.atomic import append_line
from distributed.core.errors import RankFailedError
from distributed.core.events import Event, EventTail, RankFailed, Warned
from distributed.core.protocol.rank_protocol import Leave
from distributed.core.run_dir import RunDir
from distributed.launch.clock import Clock, Timings
from distributed.launch.node.log_mirror import LogMirror
from distributed.launch.node.log_tail import crash_dump
from distributed.launch.node.rank_group import RankGroup
from distributed.launch.node.stop_signals import Stopped, Stops
from distributed.launch.rendezvous.nodes import News, Nodes, Round, RunOver, StoppedWaiting
from distributed.launch.request import LaunchRequest, NodeProcesses
from distributed.launch.supervise.end_report import EndReport, end_of
from distributed.launch.supervise.first_failure import failure_error
from distributed.launch.supervise.policy import Fault, GiveUp, Shrink, decide
from distributed.launch.supervise.report import RunReport
from distributed.launch.supervise.resize_request import read_request
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.launch.supervise.slow_ranks import SlowRanks
from distributed.launch.supervise.states import (
    Done,
    Draining,
    GivenUp,
    Leaving,
    Resizing,
    Restarting,
    Running,
    Starting,
    State,
    Unfinished,
    follow,
)
from distributed.launch.supervise.watch import Asked, Broken, Drained, Ended, Watch


@dataclass(kw_only=True)
class Supervisor:
    """Supervises a run: `start`, then `wait`, which returns when the run is done and raises if it failed or stopped."""

    request: LaunchRequest
    nodes: Nodes
    rank_group: RankGroup
    render: Callable[[Round, Sequence[int]], NodeProcesses]  # the ranks of this node in a round, on these slots
    mirror: LogMirror
    limits: RestartLimits = field(default_factory=RestartLimits)
    on_stop: Callable[[int], None] | None = None
    clock: Clock = field(default_factory=Clock)
    timings: Timings = field(default_factory=Timings)
    state: State = field(init=False)  # from `start` on

    def __post_init__(self) -> None:
        self.report = RunReport()
        self._faults: list[Fault] = []
        self._slots = list(range(self.request.ranks_per_node))
        self._worlds, self._reached = 0, 0
        self._uses_trainer = False  # a rank reached the training loop
        self._answered, self._asked_at, self._give_up_at = 0, 0.0, float("inf")  # of stop signals
        self._sizes: list[int] = []  # the legal world sizes, once a rank has reported them
        self._resize_read_at = 0.0
        self._stops = Stops(self.on_stop)
        self._slow_ranks = SlowRanks(lambda text: self._emit(Warned(time=self.clock.time(), message=text)))

    def start(self, first: Round | None = None) -> None:
        """Start the first world; `first` is the result of a rendezvous that is done. Call `wait` or `close` then."""
        RunDir(self.request.run_dir).resize.unlink(missing_ok=True)  # a resize request to an earlier run
        self.state = Starting(self._begin(first or self.nodes.gather(self.request.attempt)))

    def wait(self) -> None:
        """Wait until the run is done.

        Raises RankFailedError for the rank that failed first, and Stopped (a KeyboardInterrupt) if the run was stopped
        by a signal and its ranks ended in order.
        """
        ok, stops = False, self._stops
        with stops:
            try:
                while not isinstance(self.state, Done | GivenUp):
                    self._go(self._next(self.state))
                if isinstance(self.state, GivenUp):
                    self.rank_group.end(self.state.grace_s)
                    raise self.state.error
                self.rank_group.end(self.timings.terminate_s)
                self.mirror.finish()
                ok = self._stops.count <= 1  # an orderly stop: other nodes may still be saving
            finally:
                self.close()
                if not ok or self._stops.count:
                    self.nodes.leave(ok)
                self._tell_report(ok)
        if self._stops.number is not None:
            raise Stopped(self._stops.number)

    def close(self) -> None:
        """End all ranks at once, and close the log mirror and the rendezvous."""
        self.rank_group.close()
        self.mirror.close()
        self.nodes.close()

    def _go(self, state: State) -> None:
        self.state = follow(self.state, state)

    def _next(self, state: Unfinished) -> State:
        """The next state; returns when the current one is over."""
        match state:
            case Starting(watch) | Running(watch) | Draining(watch, _):
                return self._after_world(watch)
            case Leaving(watch):
                return self._leave(watch)
            case Restarting() | Resizing():
                return self._regroup(state)

    def _after_world(self, watch: Watch) -> State:
        """Watch a world until it ends or must be left."""
        outcome = watch.until_it_ends(lambda: self._meanwhile(watch))
        self._notice_running(watch)
        self._reached = watch.step
        self._sizes = next(
            (m.joined.sizes for m in self.rank_group.members if m.joined and m.joined.sizes), self._sizes
        )
        match outcome:
            case Asked():
                self._drain(outcome, watch)
                return Draining(watch, outcome)
            case Ended():
                return Leaving(watch)
            case Drained():
                watch.close()
                return Resizing(self._why_left(), watch.round, watch.last_step_at())
            case Broken():
                watch.close()
                return self._decide(outcome, watch)

    def _why_left(self) -> Fault:
        """All ranks have left in order: for other ranks, one of which may replace a slow one."""
        assert isinstance(self.state, Draining)
        asked = self.state.asked
        self._slow_ranks.replace(self.rank_group.members)
        why = asked.why if asked.cause == "slow" else "another number of ranks"
        host = asked.news.host if asked.news is not None and asked.cause == "slow" else socket.gethostname()
        return Fault(asked.cause, asked.rank, host, self._reached, why)

    def _leave(self, watch: Watch) -> State:
        """Wait for the other nodes, one of which may still fail, unless the run was stopped."""
        late = None if self._answered else self.nodes.leave(True, is_stopped=lambda: self._stops.count > 0)
        if late is None:
            return Done()
        watch.close()
        fault = Fault("machine", late.rank, late.host, self._reached, late.message)
        return self._decide(Broken(fault, news=late), watch)

    def _meanwhile(self, watch: Watch) -> None:
        self._notice_running(watch)
        self._answer(watch)

    def _notice_running(self, watch: Watch) -> None:
        if isinstance(self.state, Starting) and watch.is_running:
            self._go(Running(watch))

    def _begin(self, round_: Round, broke_at: float | None = None) -> Watch:
        """Begin a world: start its missing ranks, and send the surviving ranks into it."""
        rendered = self.render(round_, self._slots)
        self._round = round_
        self._worlds += 1
        self._tail = EventTail(RunDir(round_.run_dir).events) if self.request.most_nodes > 1 else None
        self.report.attempt_began(round_.attempt, self.clock.monotonic())
        if round_.place.num_nodes > 1:
            self.rank_group.give_up_gated()
        self._slow_ranks.begin_world()
        self.rank_group.begin(rendered, self._slots)
        self.mirror.attempt_began(round_.attempt)
        return Watch(
            round=round_,
            rank_group=self.rank_group,
            nodes=self.nodes,
            mirror=self.mirror,
            stops=self._stops,
            report=self.report,
            emit=self._emit,
            slow_ranks=self._slow_ranks,
            hang_timeout_s=self.limits.hang_timeout_s,
            reached_before=self._reached,
            broke_at=broke_at,
            why_resize=self._why_resize,
            stopping=lambda: self._stops.number if self._answered else None,
            collective_timeout_s=self.limits.collective_timeout_s,
            clock=self.clock,
            timings=self.timings,
        )

    def _drain(self, asked: Asked, watch: Watch) -> None:
        """Make all ranks of all nodes leave at the same step."""
        if asked.news is None:
            place = watch.round.place
            host = socket.gethostname()
            self.nodes.tell(News(place.node_rank, host, "regroup", asked.why, rank=asked.rank, cause=asked.cause))
        self.rank_group.tell(Leave(watch.round.attempt, in_order=True))
        watch.drain()

    def _decide(self, broken: Broken, watch: Watch) -> Restarting | GivenUp:
        """Decide whether the run restarts after a fault.

        A fault while a run is being stopped ends it, unless the surviving ranks can save their state in another world.
        """
        fault, news = broken.fault, broken.news
        if news is not None and news.kind == "failed":
            return self._given_up(_failed_elsewhere(news))
        if self._answered:
            if not self._can_save_later(fault):
                return self._given_up(self._failed(broken, ""))
            self._answered = 0  # the next world gets the stop signal when it can save
        if news is None or news.kind != "regroup":  # a node that sends "regroup" has decided already
            error = self._judge(broken, watch)
            if error is not None:
                return self._given_up(error)
        return Restarting(fault, watch.round, watch.last_step_at())

    def _judge(self, broken: Broken, watch: Watch) -> RankFailedError | None:
        """Report the policy's decision on a fault to the other nodes; returns the error if it gives the run up."""
        fault, news = broken.fault, broken.news
        self._faults.append(fault)
        # Stays true after the ranks that reached the loop are gone and their replacements have not reached it yet.
        self._uses_trainer |= any(member.joined is not None for member in self.rank_group.members)
        verdict = decide(
            self._faults,
            reached=self._reached,
            max_restarts=self.limits.max_restarts,
            uses_trainer=self._uses_trainer,
            min_gpus=self.limits.min_gpus or self.request.ranks_per_node,
            gpus=len(self._slots),
        )
        place = watch.round.place
        if isinstance(verdict, GiveUp):
            error = self._failed(broken, verdict.reason)
            log_path = broken.ending.log_path if broken.ending is not None else ""
            self.nodes.tell(
                News(
                    place.node_rank,
                    fault.host,
                    "failed",
                    fault.message,
                    rank=fault.rank,
                    log_path=log_path,
                    exit_code=error.exit_code,
                )
            )
            return error
        if isinstance(verdict, Shrink):
            self._slots.remove(verdict.slot)
        if news is None:
            message = f"rank {fault.rank}: {fault.message}"
            self.nodes.tell(News(place.node_rank, fault.host, "regroup", message, rank=fault.rank, cause=fault.kind))
        return None

    def _given_up(self, error: RankFailedError) -> GivenUp:
        return GivenUp(error, self.timings.terminate_s)

    def _can_save_later(self, fault: Fault) -> bool:
        """Whether a rank died near the stop signal, on one node, and a survivor can save in a new world."""
        is_in_time = self._stops.count == 1 and self.clock.monotonic() < self._asked_at + self.timings.settle_s
        can_go_on = self.request.most_nodes == 1 and any(member.can_go_on for member in self.rank_group.members)
        return is_in_time and can_go_on and fault.kind == "machine"

    def _regroup(self, ended: Restarting | Resizing) -> State:
        """Rendezvous with the other nodes again, and begin the next world."""
        fault, attempt = ended.fault, ended.round.attempt
        self.report.fault(ended.broke_at, fault)
        if fault.kind == "resize":
            self._take_resize_request()
        self.rank_group.cut_off(attempt)
        end = EndReport(
            event=end_of(attempt, fault, self.clock.time()), nodes=self.nodes, since=self._tail, emit=self._emit
        )
        end.write_if_first()  # before it may have to wait for another node
        try:
            round_ = self._gather(attempt + 1, end)
        except StoppedWaiting:
            number = self._stops.number
            return GivenUp(RunOver(News(-1, "", "done")) if number is None else Stopped(number))
        if round_.place.node_rank == 0:
            end.write()
        return Starting(self._begin(round_, ended.broke_at))

    def _gather(self, attempt: int, end: EndReport) -> Round:
        """The next rendezvous; raises StoppedWaiting if the user stopped the run, or it ended on other nodes."""
        begun, outcome = self.clock.time(), RunDir(self._round.run_dir).history

        def is_over() -> bool:
            end.write_if_first()
            self.mirror.refresh()
            return self._stops.count > 0 or (self.request.most_nodes > 1 and _was_written_since(outcome, begun))

        return self.nodes.gather(attempt, self._sizes, ranks=len(self._slots), is_stopped=is_over)

    def _failed(self, broken: Broken, reason: str) -> RankFailedError:
        """Report the failure as an event, and as the one error that the user sees."""
        fault, ending = broken.fault, broken.ending
        path = ending.log_path if ending is not None else ""
        self.mirror.finish(only=path)  # before the failure event, because the error raised here contains it
        failed = RankFailed(
            time=self.clock.time(), rank=fault.rank, host=fault.host, message=fault.message, log_path=path
        )
        self._emit(failed)
        why = reason if self._worlds > 1 else ""
        if ending is None:
            return RankFailedError(f"rank {fault.rank} (on {fault.host}) failed: {fault.message}", why=why)
        crash = crash_dump(ending.log_path)
        return failure_error(ending, fault.host, crash, message=fault.message, why=why)

    def _answer(self, watch: Watch) -> None:
        """Forward the first stop signal to the ranks, which may save; the second one ends them."""
        requests = self._stops.count  # a second signal may arrive at any moment from here on
        if requests > self._answered:
            self._asked_at = self._asked_at or self.clock.monotonic()
            assert self._stops.number is not None
            if self._answered or requests > 1:
                self.rank_group.end(0.0)
            elif not watch.is_settled and self.clock.monotonic() < self._asked_at + self.timings.settle_s:
                return  # ranks between two worlds could not save
            else:
                for member in self.rank_group.members:
                    if not member.role.serves:  # workers need the servers until they have saved
                        member.process.signal(self._stops.number)
                self._stops.announce()
                self.nodes.tell(News(-1, socket.gethostname(), "stopping", signal=self._stops.number))
                self._give_up_at = self.clock.monotonic() + self.limits.interrupt_grace_s
            self._answered = requests
        if self.clock.monotonic() > self._give_up_at:
            self.rank_group.end(0.0)

    def _why_resize(self) -> str:
        """Why the user wants this world to end, if so; read from the resize file at intervals."""
        if self.request.num_nodes > 1 or self.clock.monotonic() < self._resize_read_at:
            return ""
        self._resize_read_at = self.clock.monotonic() + self.timings.resize_every_s
        wanted = read_request(self.request.run_dir)
        return "" if wanted in (None, len(self._slots)) else f"{wanted} ranks were asked for"

    def _take_resize_request(self) -> None:
        wanted = read_request(self.request.run_dir) if self.request.num_nodes == 1 else None
        if wanted is not None:
            self._slots = list(range(wanted))
            RunDir(self.request.run_dir).resize.unlink(missing_ok=True)

    def _tell_report(self, ok: bool) -> None:
        if self._worlds > 1 and self._round.place.node_rank == 0:
            status = ("stopped" if self._stops.count else "done") if ok else "failed"
            self._uses_trainer |= any(member.joined is not None for member in self.rank_group.members)
            self.report.ended(self.clock.monotonic(), status, self._reached, counts_steps=self._uses_trainer)
            self._emit(self.report.event(self.clock.time()))

    def _emit(self, event: Event) -> None:
        append_line(RunDir(self._round.run_dir).events, event.to_json())


def _was_written_since(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime > moment
    except OSError:
        return False


def _failed_elsewhere(news: News) -> RankFailedError:
    who = f"node {news.node_rank} ({news.host})" if news.node_rank >= 0 else "the rendezvous of the nodes"
    who += f", rank {news.rank}" if news.rank >= 0 else ""
    return RankFailedError(
        f"{who} failed: {news.message}",
        why="a run that is given up on one node ends on all nodes; the ranks of this node were ended",
        do=f"look at {news.log_path} on {news.host}" if news.log_path else "",
        rank=news.rank,
        log_path=news.log_path,
        exit_code=news.exit_code,
    )
