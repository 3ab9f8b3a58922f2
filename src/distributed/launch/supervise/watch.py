"""Watch: one world of a run, looked at until it ends: well, as asked, or because something broke."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from distributed.core.control import Dump, Resumed
from distributed.core.events import Event, RankStalled, Recovered, Warned
from distributed.core.heartbeat import Phase
from distributed.launch.blame import Ending, first_failure
from distributed.launch.crew import Crew, Member
from distributed.launch.echo import Echo
from distributed.launch.hangs import HangWatch, Stall
from distributed.launch.nodes import News, Nodes, Round
from distributed.launch.policy import Fault, classify
from distributed.launch.report import RunReport
from distributed.launch.stops import Stops

_POLL_S = 0.1  # between looks when nothing happens; what a rank says, and its end, wake us at once
_NEWS_EVERY_S = 0.1
_ROOT_CAUSE_GRACE_S = 0.5  # for failures at nearly the same time
_COLLATERAL_GRACE_S = 4.0  # when only broken connections are known: somebody must have broken them
_LOST_GRACE_S = 1.0  # for another node to say what ended the world that our ranks lost
_DUMP_S = 0.5  # for the flight recorders of ranks when one of them hangs


@dataclass(frozen=True)
class Broken:
    """The world ends before the run does."""

    fault: Fault
    ending: Ending | None = None  # of the rank that is to blame, where it is one of this node
    news: News | None = None  # where it is another node's


@dataclass(frozen=True)
class Ended:
    """All ranks of this node have ended, well or as they were asked to."""


@dataclass(frozen=True)
class Drained:
    """All ranks of this node have left at the step that they agreed on."""


@dataclass(frozen=True)
class Asked:
    """Somebody wants this world to end in order: a node that waits to join, or the user, who wants another size."""

    why: str
    news: News | None = None


Outcome = Broken | Ended | Drained | Asked


@dataclass
class Watch:
    """Of one world; `look` is called until it returns something."""

    round: Round
    crew: Crew
    nodes: Nodes
    echo: Echo
    stops: Stops
    report: RunReport
    emit: Callable[[Event], None]
    hang_timeout_s: float | None
    reached_before: int  # the highest step of the worlds before this one
    broke_at: float | None = None  # when the one before this broke
    wish: Callable[[], str] = lambda: ""  # why the user wants this world to end in order, if so
    stopping: Callable[[], int | None] = lambda: None  # the signal by which the ranks were asked to stop

    def __post_init__(self) -> None:
        self.is_running = False  # all ranks have come to their loop
        self.is_draining = False
        self.begun_at = time.monotonic()
        self._stalled_at: float | None = None
        self._has_refused = False
        self._hangs: HangWatch | None = None
        self._resumed: Resumed | None = None
        self._is_recovered = self.broke_at is None
        self._failed_at: float | None = None
        self._news: News | None = None
        self._news_at = 0.0

    def until_it_ends(self, meanwhile: Callable[[], None]) -> Outcome:
        """`meanwhile` is called before every look, and may signal the ranks."""
        while True:
            meanwhile()
            outcome = self.look()
            if outcome is not None:
                return outcome
            if self._failed_at is None:
                self.echo.drain()  # what the survivors of a failure say stays in their logs
            self.echo.refresh()
            self.crew.wait(_POLL_S)

    def look(self) -> Outcome | None:
        self.crew.notice()
        self._hear()  # after it: what a rank said before another's end counts when that end is dealt with
        members, failure = self.crew.members, self.failure()
        if failure is not None:
            self._failed_at = self._failed_at or time.monotonic()
            if self._is_root_cause(failure):
                return Broken(self._fault(failure), ending=failure)
        news = self._next_news()
        if news is not None and news.kind == "stopping":
            self.stops.request(news.signal)
            self._news = None
        elif news is not None and news.kind == "done":
            return Ended()
        elif news is not None and (self.stopping() is None or news.kind != "regroup"):
            if news.kind == "regroup" and news.cause == "resize" and not self.is_draining:
                return Asked(news.message, news)
            return Broken(_fault_elsewhere(news, self.step), news=news)
        awaited = [member for member in members if not member.role.serves] or members
        if awaited and all(member.ending is not None for member in awaited) and failure is None:
            return Ended()
        return None if failure is not None else self._look_at_the_living()

    def _look_at_the_living(self) -> Outcome | None:
        stall = self._hangs.look() if self._hangs is not None and self.stopping() is None else None
        if stall is not None:
            self._end_stalled(stall)
        members = self.crew.members
        lost = [member for member in members if member.lost == self.round.attempt]
        if self.is_draining:
            return Drained() if members and len(lost) == len(members) else None
        if lost:
            return self._lost_without_cause(lost[0])
        if self.is_running and self.stopping() is None:
            can_go_on = all(member.can_go_on and not member.role.serves for member in members)
            if can_go_on and self.nodes.newcomer():
                return Asked("a node waits to join")
            if why := self.wish():
                if can_go_on:
                    return Asked(why)
                self._cannot_resize()
        return None

    def _cannot_resize(self) -> None:
        if not self._has_refused:
            message = (
                "this run cannot get another number of ranks while it runs: its ranks keep no state in memory (NCCL)"
            )
            self.emit(Warned(time=time.time(), message=message))
            self._has_refused = True

    def drain(self) -> None:
        """The ranks were asked to leave in order: from now on that is what is waited for."""
        self.is_draining, self._news = True, None

    @property
    def is_settled(self) -> bool:
        """Whether a signal would find the ranks at their steps, able to save: else it would only end them."""
        lost = any(member.lost == self.round.attempt for member in self.crew.members)
        if not self.round.restarts:
            return not self.is_draining and not lost and self.failure() is None
        is_told = self._resumed is not None or self.round.place.node_rank != 0
        return self.is_running and is_told and not self.is_draining and not lost and self.failure() is None

    @property
    def step(self) -> int:
        """The highest that is known to be finished."""
        return max([self.reached_before, *self.crew.steps.values()])

    def last_step_at(self) -> float:
        """When this world last did something, as far as this node saw: what came after it is time that was lost."""
        if self._stalled_at is not None:
            return self._stalled_at
        beats = [beat for member in self.crew.members if (beat := member.beat) is not None]
        signs = [beat.time_ns / 1e9 for beat in beats if beat.phase is not Phase.ENDED]
        return max([self.begun_at, *signs]) if signs else time.monotonic()

    def failure(self) -> Ending | None:
        stopping = self.stopping()
        endings = (member.ending for member in self.crew.members if member.ending is not None)
        return first_failure(e for e in endings if not e.is_benign(stopping) or (stopping is None and e.code == 0))

    def close(self) -> None:
        if self._hangs is not None:
            self._hangs.close()

    def _hear(self) -> None:
        for _, message in self.crew.hear():
            if isinstance(message, Resumed) and message.attempt == self.round.attempt:
                self._resumed = message
        members = self.crew.members
        if not self.is_running and members and all(m.joined is not None and m.ending is None for m in members):
            self.is_running = True
            self._hangs = HangWatch([member.watched for member in members], self.hang_timeout_s)
        if not self._is_recovered:
            self._note_recovery()

    def _note_recovery(self) -> None:
        """The first step after a world broke. The node of rank 0, which knows what the state came from, tells it."""
        assert self.broke_at is not None
        steps = self.crew.steps
        if self._resumed is None or not steps or max(steps.values()) <= self._resumed.step:
            return
        self._is_recovered = True
        now, resumed = time.monotonic(), self._resumed
        lost = max(0, self.reached_before - resumed.step)
        self.report.recovered(now, self.round.attempt, resumed.step, lost, resumed.source)
        self.emit(
            Recovered(
                time=time.time(),
                attempt=self.round.attempt,
                step=resumed.step,
                lost_steps=lost,
                source=resumed.source,
                seconds=now - self.broke_at,
                world_size=self.round.place.world_size,
            )
        )

    def _is_root_cause(self, failure: Ending) -> bool:
        """A rank that a signal ended is; of errors, several come at nearly the same time, and some only follow."""
        assert self._failed_at is not None
        if failure.cannot_go_on:
            return True
        is_guess = failure.is_collateral or (failure.code == 0 and not failure.is_early)
        if not is_guess:
            if failure.record is None or all(member.ending is not None for member in self.crew.members):
                return True
            return time.monotonic() > self._failed_at + _ROOT_CAUSE_GRACE_S
        return time.monotonic() > self._failed_at + _COLLATERAL_GRACE_S

    def _fault(self, failure: Ending) -> Fault:
        member = next(member for member in self.crew.members if member.ending is failure)
        step = self.step if member.joined is not None else -1
        host, alone = socket.gethostname(), failure.is_collateral and not failure.cannot_go_on
        is_after = member.joined is not None and member.joined.is_done
        return classify(failure, step, host, slot=member.slot, hung=member.hung, is_alone=alone, is_after=is_after)

    def _lost_without_cause(self, lost: Member) -> Broken | None:
        """Ranks say that their world broke, and none of this node did it: another node did, or the network."""
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() < self._failed_at + _LOST_GRACE_S:
            return None
        message = f"a connection between the ranks broke: {lost.lost_message.partition(chr(10))[0]}"
        return Broken(Fault("machine", lost.rank, socket.gethostname(), self.step, message))

    def _next_news(self) -> News | None:
        if self._news is None and time.monotonic() >= self._news_at:
            self._news_at = time.monotonic() + _NEWS_EVERY_S
            self._news = self.nodes.news()
        return self._news

    def _end_stalled(self, stall: Stall) -> None:
        """Name the rank that hangs, keep what the ranks know of their collectives, and end it."""
        if stall.kind == "unknown" and self.round.place.num_nodes > 1:
            return  # the ranks of this node wait for one of another node's, which its own agent names
        self.emit(
            RankStalled(
                time=time.time(),
                rank=stall.rank,
                host=socket.gethostname(),
                step=stall.step,
                where=stall.where,
                late_seconds=stall.late_s,
                deadline_seconds=stall.deadline_s,
                waiting=list(stall.waiting),
                stack_path=stall.stack_path,
            )
        )
        self.echo.refresh()
        for member in self.crew.members:
            member.tell(Dump(os.path.join(member.attempt_dir, f"collectives-{member.rank}.json")))
        time.sleep(_DUMP_S)
        self._stalled_at = time.monotonic() - stall.late_s
        for member in self.crew.members:
            if member.rank == stall.rank:
                member.hung = True
                member.process.signal(signal.SIGKILL)


def _fault_elsewhere(news: News, step: int) -> Fault:
    kind = news.cause if news.cause in ("code", "hang", "resize") else "machine"
    return Fault(kind, news.rank, news.host, step, news.message)  # type: ignore[arg-type]
