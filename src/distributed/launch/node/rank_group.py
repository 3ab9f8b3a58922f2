"""RankGroup: the processes of this node's ranks over all attempts; survivors are kept, others restarted."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from distributed.core.atomic import make_private
from distributed.core.env import LAUNCHER_PID, StoreDoor
from distributed.core.errors import LaunchError
from distributed.core.protocol.failure import FailureRecord
from distributed.core.protocol.heartbeat import Beat, read_beat
from distributed.core.protocol.rank_protocol import (
    Broke,
    Close,
    Closed,
    Joined,
    Leave,
    Lost,
    Message,
    World,
    decode,
    encode,
)
from distributed.core.run_dir import AttemptDir
from distributed.launch.clock import Clock, HasFileno, Timings
from distributed.launch.node.kernel import Kernel
from distributed.launch.node.processes import RankProcess, end_all
from distributed.launch.node.warm_parent import WarmParent
from distributed.launch.request import NodeProcesses, ProcessSpec, Role
from distributed.launch.supervise.aborts import aborted_record, unstarted_record
from distributed.launch.supervise.first_failure import Ending
from distributed.launch.supervise.stack_query import Watched


@dataclass
class RankHandle:
    """One rank's process."""

    process: RankProcess
    slot: int  # its place on this node; stays when ranks are renumbered
    rank: int
    attempt_dir: str  # of its current attempt
    born_in: str  # of the attempt that it was started for: its stacks and its failure are written there
    born_as: int
    role: Role = field(default_factory=Role)
    clock: Clock = field(default_factory=Clock, repr=False)
    timings: Timings = field(default_factory=Timings, repr=False)
    joined: Joined | None = None  # the message that it sent when it reached the training loop
    lost: int = -1  # the last attempt that it has left
    broke: int = -1  # the last attempt whose end it has noticed; it may still have to leave it
    closed: int = -1  # the last attempt of which no step counts on it any more
    lost_message: str = ""
    holds: bool = False  # the whole state of the run, in the attempt that it has left last
    ending: Ending | None = None
    hung: bool = False
    is_given_up: bool = False  # it was sent SIGKILL to be replaced, and may not have ended yet
    _heard: bytes = field(default=b"", repr=False)
    _failing_since: float | None = field(default=None, repr=False)
    _leaving: tuple[int, float] = field(default=(-1, 0.0), repr=False)  # the attempt that it is to leave, since when

    @property
    def can_go_on(self) -> bool:
        """The same process in another world, with the state that it holds."""
        is_left = self.ending is None and not self.is_given_up
        return is_left and self.joined is not None and self.joined.regroups

    @property
    def has_gate(self) -> bool:
        return self.joined is not None and self.joined.has_gate

    def give_up(self) -> None:
        """End the rank, to be replaced in the next world."""
        self.is_given_up = True
        self.process.end(signal.SIGKILL)

    def counts_steps(self, attempt: int) -> bool:
        """Whether steps of an attempt may still count on this rank, which will be kept."""
        return self.can_go_on and self.has_gate and max(self.closed, self.lost) < attempt

    @property
    def beat(self) -> Beat | None:
        return read_beat(AttemptDir(self.attempt_dir).heartbeat(self.rank))

    @property
    def watched(self) -> Watched:
        heartbeat = AttemptDir(self.attempt_dir).heartbeat(self.rank)
        return Watched(self.rank, self.process.pid, heartbeat, AttemptDir(self.born_in).stack(self.born_as))

    @property
    def has_failed(self) -> bool:
        """Whether the rank has ended or has reported a failure."""
        return self.ending is not None or self._failing_since is not None

    @property
    def collectives_path(self) -> str:
        return str(AttemptDir(self.attempt_dir).collectives(self.rank))

    def tell(self, message: Message) -> None:
        if self.process.control is not None and self.ending is None:
            with suppress(OSError):  # the rank has just ended
                self.process.control.sendall(encode(message))

    def cut_off(self, attempt: int) -> None:
        """Have the rank leave this attempt at once."""
        self.tell(Leave(attempt, in_order=False))
        before, _ = self._leaving
        if self.lost >= before:  # otherwise it has not yet left the one before that
            self._leaving = (attempt, self.clock.monotonic())

    def end_restless(self) -> None:
        """End a rank whose device does not come to rest: the others of its next world would wait for it."""
        attempt, since = self._leaving
        is_late = self.lost < attempt and self.clock.monotonic() > since + self.timings.rest_s
        if is_late and self.has_gate and self.ending is None and not self.hung:
            self.hung = True
            self.process.signal(signal.SIGKILL)

    def hear(self) -> list[Message]:
        """The messages of the rank since the last call; never waits."""
        line = self.process.control
        if line is None:
            return []
        while True:
            try:
                part = line.recv(65536, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionResetError):
                break
            if not part:
                break
            self._heard += part
        *lines, self._heard = self._heard.split(b"\n")
        return [message for message in map(decode, lines) if message is not None]

    def notice(self) -> None:
        """Record the rank's exit, or that it reported a failure and did not exit in time."""
        if self.ending is not None:
            self.process.poll()
            return
        code, record_path = self.process.poll(), AttemptDir(self.born_in).failure(self.born_as)
        if code is not None:
            record = FailureRecord.read(record_path) if code else None
            when = record.time if record else self.clock.time() - self.timings.notice_s
            if record is None and code == -signal.SIGABRT:
                record = aborted_record(
                    self.process.log_path, rank=self.rank, host=socket.gethostname(), pid=self.process.pid, time=when
                )
            if record is None and self.process.why_never_started:
                parent_log = AttemptDir(self.born_in).parent_log
                record = unstarted_record(
                    self.process.why_never_started, parent_log, rank=self.rank, host=socket.gethostname(), time=when
                )
            self.ending = Ending(
                self.rank, code, when, self.process.log_path, record, ended_by_us=self.process.ended_by_us
            )
        elif record_path.exists():
            self._failing_since = self._failing_since or self.clock.monotonic()
            if self.clock.monotonic() - self._failing_since > self.timings.exit_s:
                record = FailureRecord.read(record_path)
                assert record is not None
                self.process.end(signal.SIGKILL)
                self.ending = Ending(self.rank, record.exit_code, record.time, self.process.log_path, record)

    def judge(self) -> None:
        """Set whether the rank ended too early, once all of its messages are read."""
        if self.ending is None or self.ending.code != 0 or self.ending.is_early or not self.ending.in_loop:
            return
        if self.joined is None:
            self.ending = replace(self.ending, in_loop=False)
        elif self.joined.in_run:
            self.ending = replace(self.ending, early_at=self.beat.step if self.beat is not None else 0)


class RankGroup:
    """The ranks of this node; `begin` prepares them for the next world."""

    def __init__(
        self,
        environ: Mapping[str, str],
        python: str,
        *,
        preload: tuple[str, ...] | None = None,
        parent: WarmParent | None = None,
        with_control: bool = True,
        frees_devices: bool = False,
        on_started: Callable[[RankHandle], None] = lambda member: None,
        door: Callable[[], StoreDoor] | None = None,
        kernel: Kernel | None = None,
        clock: Clock | None = None,
        timings: Timings | None = None,
    ) -> None:
        """`preload`: the modules that the parent of all ranks imports; None: every rank has its own interpreter.
        `parent`: a warm parent that serves other groups too, and is not closed with this one.
        `frees_devices`: ranks that leave must have ended before new ones start, which need their GPU memory.
        `door`: the address of the ranks' store, passed apart from the rendered environment, which users see."""
        self._environ, self._python, self._preload, self._with_control = environ, python, preload, with_control
        self.frees_devices = frees_devices
        self._door = door
        self.kernel, self._clock, self._timings = kernel or Kernel(), clock or Clock(), timings or Timings()
        self._parent, self._shares_parent = parent, parent is not None
        self._on_started = on_started
        self.members: list[RankHandle] = []
        self._leaving: list[RankProcess] = []  # ranks of earlier worlds that are being ended

    def begin(self, rendered: NodeProcesses, slots: Iterable[int]) -> None:
        """Begin the next world: one process for each rank of `rendered`, in the order of the slots."""
        make_private(rendered.attempt_dir)
        pairs = list(zip(rendered.processes, slots, strict=False))
        is_lost = any(member.role.is_vital and member.ending is not None for member in self.members)
        able = [] if is_lost else [member for member in self.members if member.can_go_on]
        staying = {m.slot: m for m in able if m.slot in {slot for _, slot in pairs}}
        for member in self.members:
            if member.slot not in staying or staying[member.slot] is not member:
                member.process.end(signal.SIGKILL)
                self._leaving.append(member.process)
        if self.frees_devices:
            end_all(self._leaving, 0.0, self._clock)
        self.members = []
        for spec, slot in pairs:
            if slot in staying:
                member = staying[slot]
                member.rank, member.attempt_dir = spec.rank, rendered.attempt_dir
                member.tell(World(dict(spec.env) | self._secrets()))
                self.members.append(member)
            else:
                self.members.append(self._start(rendered, spec, slot))

    def _start(self, rendered: NodeProcesses, spec: ProcessSpec, slot: int) -> RankHandle:
        AttemptDir(rendered.attempt_dir).failure(spec.rank).unlink(missing_ok=True)
        environ = dict(self._environ) | dict(spec.env) | self._secrets() | {LAUNCHER_PID: str(os.getpid())}
        try:
            process = self._make(rendered, spec, environ)
        except OSError as error:
            raise LaunchError(
                f"rank {spec.rank} could not be started",
                why=str(error),
                do=f"check that {rendered.run_dir} can be written and that {self._python} runs",
            ) from error
        member = RankHandle(
            process,
            slot,
            spec.rank,
            attempt_dir=rendered.attempt_dir,
            born_in=rendered.attempt_dir,
            born_as=spec.rank,
            role=spec.role,
            clock=self._clock,
            timings=self._timings,
        )
        self._on_started(member)
        return member

    def _secrets(self) -> dict[str, str]:
        return {} if self._door is None else self._door().to_environ()

    def _make(self, rendered: NodeProcesses, spec: ProcessSpec, environ: Mapping[str, str]) -> RankProcess:
        if self._parent is not None and self._shares_parent:
            return self._parent.start(spec, environ, self._with_control)
        if self._preload is None or not WarmParent.is_supported():
            return RankProcess(spec, environ, with_control=self._with_control, kernel=self.kernel)
        if self._parent is None or not self._parent.is_alive:
            log_path = str(AttemptDir(rendered.attempt_dir).parent_log)
            self._parent = WarmParent(self._python, environ, self._preload, log_path=log_path)
        return self._parent.start(spec, environ, self._with_control)

    def hear(self) -> list[tuple[RankHandle, Message]]:
        """The messages of the ranks; `Joined` and the like are also stored on their rank."""
        heard = [(member, message) for member in self.members for message in member.hear()]
        for member, message in heard:
            if isinstance(message, Joined):
                member.joined = message
            elif isinstance(message, Closed):
                member.closed = message.attempt
            elif isinstance(message, Broke):
                member.broke, member.lost_message = message.attempt, message.message
            elif isinstance(message, Lost):
                member.lost = member.broke = message.attempt
                member.holds = message.holds
                member.lost_message = message.message
        for member in self.members:
            member.judge()
            member.end_restless()
        return heard

    def notice(self) -> None:
        for member in self.members:
            member.notice()
        self._leaving = [process for process in self._leaving if not process.is_gone()]

    def tell(self, message: Message) -> None:
        for member in self.members:
            member.tell(message)

    def cut_off(self, attempt: int) -> None:
        """Have the surviving ranks leave this attempt at once, wherever they stand in it."""
        self._close_gates(attempt)
        for member in self.members:
            member.cut_off(attempt)

    def give_up_gated(self) -> None:
        """End the ranks with a gate, before a world of several nodes: each node closes the gates of its own only."""
        for member in self.members:
            if member.has_gate:
                member.give_up()

    def _close_gates(self, attempt: int) -> None:
        """Wait until no step counts on any rank that has a gate, because the first abort sends garbage to its peers.

        Ranks that are not kept could save that garbage, and are ended before; as are those that do not answer.
        """
        if not any(member.counts_steps(attempt) for member in self.members):
            return
        for member in self.members:
            if member.ending is None and not member.can_go_on:
                member.give_up()
        asked: set[int] = set()
        deadline = self._clock.monotonic() + self._timings.close_s
        while still_open := [member for member in self.members if member.counts_steps(attempt)]:
            for member in still_open:
                if member.slot not in asked:
                    member.tell(Close(attempt))
                    asked.add(member.slot)
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0:
                for member in still_open:
                    member.give_up()
                return
            self.wait(left_s)
            self.notice()
            self.hear()

    def wait(self, seconds: float) -> None:
        """Wait until a rank sends a message or ends, or the timeout is over."""
        living = [member for member in self.members if member.ending is None]
        lines: list[HasFileno] = [member.process.control for member in living if member.process.control is not None]
        if self._parent is not None and self._parent.is_alive:
            lines.append(self._parent)  # it reports which rank has ended
        else:
            seconds = min(seconds, self._timings.unwatched_poll_s)
        self._clock.wait(lines, seconds)

    @property
    def steps(self) -> dict[int, int]:
        """The steps that each started rank has finished."""
        return {member.rank: beat.step for member in self.members if (beat := member.beat) is not None}

    def end(self, grace_s: float) -> None:
        """End all ranks and their child processes."""
        end_all([*(member.process for member in self.members), *self._leaving], grace_s, self._clock)
        self.notice()

    def close(self) -> None:
        self.end(0.0)
        if self._parent is not None and not self._shares_parent:
            self._parent.close()
        for member in self.members:
            if member.process.control is not None:
                member.process.control.close()
