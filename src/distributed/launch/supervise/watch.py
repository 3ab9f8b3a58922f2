"""Watch: one world of a run, polled until it ends: well, by a stop signal, or by a fault."""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from distributed.core.events import Event, RankStalled, Recovered, Warned
from distributed.core.protocol.heartbeat import Phase
from distributed.core.protocol.rank_protocol import Dump, Resumed, Slow
from distributed.launch.clock import Clock, Timings
from distributed.launch.node.log_mirror import LogMirror
from distributed.launch.node.rank_group import RankGroup, RankHandle
from distributed.launch.node.stop_signals import Stops
from distributed.launch.rendezvous.nodes import News, Nodes, Round
from distributed.launch.supervise.first_failure import Ending, first_failure
from distributed.launch.supervise.flight_recorders import Recorders
from distributed.launch.supervise.hangs import HangWatch, Stall
from distributed.launch.supervise.memory_inquiry import MemoryInquiry
from distributed.launch.supervise.policy import Fault, classify
from distributed.launch.supervise.report import RunReport
from distributed.launch.supervise.slow_ranks import SlowRanks

_IN_ORDER = ("resize", "slow")  # why a node leaves a world that is not broken


@dataclass(frozen=True)
class Broken:
    """A fault ended the world before the run was over."""

    fault: Fault
    ending: Ending | None = None  # of the rank to blame, if it is on this node
    news: News | None = None  # if the rank is on another node


@dataclass(frozen=True)
class Ended:
    """All ranks of this node have ended, well or by a stop signal."""


@dataclass(frozen=True)
class Drained:
    """All ranks of this node have left at the step that they agreed on."""


@dataclass(frozen=True)
class Asked:
    """A request to end this world in order: a node waits to join, the user wants another size, or a rank is slow."""

    why: str
    news: News | None = None
    cause: Literal["resize", "slow"] = "resize"
    rank: int = -1  # the slow one


Outcome = Broken | Ended | Drained | Asked


@dataclass(kw_only=True)
class Watch:
    """Watches one world; `look` is called until it returns an outcome."""

    round: Round
    rank_group: RankGroup
    nodes: Nodes
    mirror: LogMirror
    stops: Stops
    report: RunReport
    emit: Callable[[Event], None]
    slow_ranks: SlowRanks
    hang_timeout_s: float | None
    reached_before: int  # the highest step of the worlds before this one
    broke_at: float | None = None  # when the previous world broke
    why_resize: Callable[[], str] = lambda: ""  # why the user wants this world to end in order, if so
    stopping: Callable[[], int | None] = lambda: None  # the stop signal that the ranks got
    collective_timeout_s: float = math.inf  # after which a collective fails
    clock: Clock = field(default_factory=Clock)
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        self.is_running = False  # all ranks have reached the training loop
        self.is_draining = False
        self.begun_at = self.clock.monotonic()
        self._stalled_at: float | None = None
        self._has_refused = False
        self._memory = MemoryInquiry(self.rank_group.members, self.clock, self.timings.memory_s)
        self._hangs: HangWatch | None = None
        self._resumed: Resumed | None = None
        self._is_recovered = self.broke_at is None
        self._failed_at: float | None = None
        self._news: News | None = None
        self._news_at = 0.0

    def until_it_ends(self, meanwhile: Callable[[], None]) -> Outcome:
        """Poll until the world ends; `meanwhile` is called before every poll, and may signal the ranks."""
        while True:
            meanwhile()
            outcome = self.look()
            if outcome is not None:
                return outcome
            if self._failed_at is None:  # after a failure, the survivors' lines stay in their logs
                self.mirror.drain(hides_traces=any(member.has_gate for member in self.rank_group.members))
            self.mirror.refresh()
            self.rank_group.wait(self.timings.poll_s)

    def look(self) -> Outcome | None:
        self.rank_group.notice()
        self._memory.look()
        self._hear()  # after it: messages sent before a rank's exit count when that exit is judged
        members, failure = self.rank_group.members, self.failure()
        if failure is not None:
            self._failed_at = self._failed_at or self.clock.monotonic()
            if self._is_root_cause(failure):
                reported = self._memory.tell(failure)
                return Broken(self._fault(failure, reported), ending=reported)
        news = self._next_news()
        if news is not None and news.kind == "stopping":
            self.stops.request(news.signal)
            self._news = None
        elif news is not None and news.kind == "done":
            return Ended()
        elif news is not None and (self.stopping() is None or news.kind != "regroup"):
            if news.kind == "regroup" and news.cause in _IN_ORDER and not self.is_draining:
                return Asked(news.message, news, "slow" if news.cause == "slow" else "resize", news.rank)
            return Broken(_fault_elsewhere(news, self.step), news=news)
        awaited = [member for member in members if not member.role.serves] or members
        if awaited and all(member.ending is not None for member in awaited) and failure is None:
            return Ended()
        return None if failure is not None else self._look_at_the_living()

    def _look_at_the_living(self) -> Outcome | None:
        stall = self._hangs.look() if self._hangs is not None and self.stopping() is None else None
        if stall is not None:
            self._end_stalled(stall)
        members = self.rank_group.members
        attempt = self.round.attempt
        lost = [member for member in members if member.broke == attempt]
        if self.is_draining and any(m.joined and m.joined.in_run and not m.joined.regroups for m in members):
            self.is_draining = False  # a rank found out, after it was asked to leave, that it could not continue
            self._cannot_resize()
        if self.is_draining and all(member.lost == attempt for member in lost):
            return Drained() if members and len(lost) == len(members) else None
        if lost:
            return self._lost_without_cause(lost[0])
        if self.is_running and self.stopping() is None:
            can_go_on = all(member.can_go_on and not member.role.serves for member in members)
            can_have_nodes = can_go_on and not any(member.has_gate for member in members)
            if can_have_nodes and self.nodes.newcomer():
                return Asked("a node waits to join")
            if why := self.why_resize():
                if can_go_on:
                    return Asked(why)
                self._cannot_resize()
            if slow := self.slow_ranks.asked(can_go_on=can_go_on):
                return Asked(slow[1], cause="slow", rank=slow[0])
        return None

    def _cannot_resize(self) -> None:
        if not self._has_refused:
            message = (
                "this run cannot get another number of ranks while it runs: its ranks cannot hand over their state"
            )
            self.emit(Warned(time=self.clock.time(), message=message))
            self._has_refused = True

    def drain(self) -> None:
        """Wait from now on for the ranks to leave in order."""
        self.is_draining, self._news = True, None

    @property
    def is_settled(self) -> bool:
        """Whether the ranks are in their steps and can save after a stop signal, which otherwise only ends them."""
        lost = any(member.broke == self.round.attempt for member in self.rank_group.members)
        if not self.round.restarts:
            return not self.is_draining and not lost and self.failure() is None
        is_reported = self._resumed is not None or self.round.place.node_rank != 0
        return self.is_running and is_reported and not self.is_draining and not lost and self.failure() is None

    @property
    def step(self) -> int:
        """The highest step that is known to be finished."""
        return max([self.reached_before, *self.rank_group.steps.values()])

    def last_step_at(self) -> float:
        """The time of the last step that this node noticed; the time after it is lost."""
        if self._stalled_at is not None:
            return self._stalled_at
        beats = [beat for member in self.rank_group.members if (beat := member.beat) is not None]
        signs = [beat.time_ns / 1e9 for beat in beats if beat.phase is not Phase.ENDED]
        return max([self.begun_at, *signs]) if signs else self.clock.monotonic()

    def failure(self) -> Ending | None:
        stopping = self.stopping()
        endings = (member.ending for member in self.rank_group.members if member.ending is not None)
        return first_failure(e for e in endings if not e.is_benign(stopping) or (stopping is None and e.code == 0))

    def close(self) -> None:
        if self._hangs is not None:
            self._hangs.close()

    def _hear(self) -> None:
        for member, message in self.rank_group.hear():
            if isinstance(message, Resumed) and message.attempt == self.round.attempt:
                self._resumed = message
            elif isinstance(message, Slow) and message.attempt == self.round.attempt:
                self.slow_ranks.hear(member, message)
        members = self.rank_group.members
        if not self.is_running and members and all(m.joined is not None and m.ending is None for m in members):
            self.is_running = True
            watched = [member.watched for member in members]
            has_nccl = self.rank_group.frees_devices and self.round.place.world_size > 1
            nccl_s = self.collective_timeout_s if has_nccl else math.inf
            self._hangs = HangWatch(
                watched,
                self.hang_timeout_s,
                recorders=self._recorders(),
                collective_s=nccl_s,
                ends_collectives=any(member.has_gate for member in members),
                clock_ns=self.clock.monotonic_ns,
                kernel=self.rank_group.kernel,
            )
        if not self._is_recovered:
            self._note_recovery()

    def _recorders(self) -> Recorders | None:
        """The flight recorders of ranks on GPUs, whose hosts do not wait in a collective."""
        if not self.rank_group.frees_devices:
            return None
        members = {member.rank: member for member in self.rank_group.members}
        return Recorders(
            {rank: Path(member.collectives_path) for rank, member in members.items()},
            lambda rank: members[rank].tell(Dump(members[rank].collectives_path)),
        )

    def _note_recovery(self) -> None:
        """Report the first step after a fault; only the node of rank 0, which knows the source of the state, does."""
        assert self.broke_at is not None
        steps = self.rank_group.steps
        if self._resumed is None or not steps or max(steps.values()) <= self._resumed.step:
            return
        self._is_recovered = True
        now, resumed = self.clock.monotonic(), self._resumed
        lost = 0 if resumed.is_furthest else max(0, self.reached_before - resumed.step)
        self.report.recovered(now, self.round.attempt, resumed.step, lost, resumed.source)
        self.emit(
            Recovered(
                time=self.clock.time(),
                attempt=self.round.attempt,
                step=resumed.step,
                lost_steps=lost,
                source=resumed.source,
                seconds=now - self.broke_at,
                world_size=self.round.place.world_size,
            )
        )

    def _is_root_cause(self, failure: Ending) -> bool:
        """Whether the root cause is known: a signal is one, but of several errors some may be collateral."""
        assert self._failed_at is not None
        if failure.cannot_go_on:
            return True
        is_guess = failure.is_collateral or (failure.code == 0 and not failure.is_early)
        if not is_guess:
            if failure.record is None or all(member.ending is not None for member in self.rank_group.members):
                return True
            return self.clock.monotonic() > self._failed_at + self.timings.root_cause_s
        return self.clock.monotonic() > self._failed_at + self.timings.collateral_s

    def _fault(self, failure: Ending, reported: Ending) -> Fault:
        member = next(member for member in self.rank_group.members if member.ending is failure)
        step = self.step if member.joined is not None else -1
        host, alone = socket.gethostname(), failure.is_collateral and not failure.cannot_go_on
        is_after = member.joined is not None and member.joined.is_done
        return classify(reported, step, host, slot=member.slot, hung=member.hung, is_alone=alone, is_after=is_after)

    def _lost_without_cause(self, lost: RankHandle) -> Broken | None:
        """The outcome if ranks report a broken world and no rank of this node failed: a node or the network did."""
        self._failed_at = self._failed_at or self.clock.monotonic()
        if self.clock.monotonic() < self._failed_at + self.timings.lost_s:
            return None
        message = f"a connection between the ranks broke: {lost.lost_message.partition(chr(10))[0]}"
        return Broken(Fault("machine", lost.rank, socket.gethostname(), self.step, message))

    def _next_news(self) -> News | None:
        if self._news is None and self.clock.monotonic() >= self._news_at:
            self._news_at = self.clock.monotonic() + self.timings.news_every_s
            self._news = self.nodes.news()
        return self._news

    def _end_stalled(self, stall: Stall) -> None:
        """Report the rank that hangs, keep the ranks' flight recorders, and end it."""
        if stall.kind == "unknown" and self.round.place.num_nodes > 1:
            return  # the ranks of this node wait for a rank of another node, whose own agent reports it
        self.emit(
            RankStalled(
                time=self.clock.time(),
                rank=stall.rank,
                host=socket.gethostname(),
                step=stall.step,
                where=stall.where,
                late_seconds=stall.late_s,
                deadline_seconds=stall.deadline_s,
                waiting=list(stall.waiting),
                stack_path=stall.stack_path,
                collective=stall.collective,
            )
        )
        self.mirror.refresh()
        if not self.rank_group.frees_devices:  # otherwise the ranks have reported before
            for member in self.rank_group.members:
                member.tell(Dump(member.collectives_path))
            self.clock.sleep(self.timings.dump_s)
        self._stalled_at = self.clock.monotonic() - stall.late_s
        for member in self.rank_group.members:
            if member.rank == stall.rank:
                member.hung = True
                member.process.signal(signal.SIGKILL)


def _fault_elsewhere(news: News, step: int) -> Fault:
    kind = news.cause if news.cause in ("code", "hang", *_IN_ORDER) else "machine"
    return Fault(kind, news.rank, news.host, step, news.message)  # type: ignore[arg-type]
