"""Crew: the ranks of this node as processes, over all worlds of a run. Whoever can goes on in the next one; others are
started anew.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed.core.control import Joined, Lost, Message, World, decode, encode
from distributed.core.env import LAUNCHER_PID, StoreDoor
from distributed.core.errors import LaunchError
from distributed.core.failure import FailureRecord, failure_path
from distributed.core.heartbeat import Beat, heartbeat_path, read_beat
from distributed.core.private_files import make_private
from distributed.launch.blame import Ending
from distributed.launch.hangs import Watched
from distributed.launch.processes import RankProcess, end_all
from distributed.launch.request import ProcessSpec, Rendered, Role
from distributed.launch.warm_parent import WarmParent

_NOTICE_S = 0.2  # a death without a word happened up to this long before it is noticed
_UNTOLD_S = 0.02  # between looks where nobody tells that a rank has ended
_EXIT_GRACE_S = 5.0  # from a rank's failure file to its end; then it hangs in its own clean-up


@dataclass
class Member:
    """One rank's process."""

    process: RankProcess
    slot: int  # which of this node's places it has; stays when ranks are numbered anew
    rank: int
    attempt_dir: str  # of the world that it is in
    born_in: str  # of the world that it was started for: its stacks and its failure are written there
    born_as: int
    role: Role = field(default_factory=Role)
    joined: Joined | None = None  # what it said of itself once it reached our loop
    lost: int = -1  # the last attempt that it has left
    lost_message: str = ""
    ending: Ending | None = None
    hung: bool = False
    _heard: bytes = field(default=b"", repr=False)
    _failing_since: float | None = field(default=None, repr=False)

    @property
    def can_go_on(self) -> bool:
        """In another world, with what it holds."""
        return self.ending is None and self.joined is not None and self.joined.regroups

    @property
    def beat(self) -> Beat | None:
        return read_beat(heartbeat_path(self.attempt_dir, self.rank))

    @property
    def watched(self) -> Watched:
        heartbeat = heartbeat_path(self.attempt_dir, self.rank)
        return Watched(self.rank, self.process.pid, heartbeat, Path(self.born_in) / f"stack-{self.born_as}.txt")

    def tell(self, message: Message) -> None:
        if self.process.control is not None and self.ending is None:
            with suppress(OSError):  # it has just ended
                self.process.control.sendall(encode(message))

    def hear(self) -> list[Message]:
        """What it said since the last call; never waits."""
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
        """Write down its end, or that it said that it failed and does not come to an end."""
        if self.ending is not None:
            self.process.poll()
            return
        code, record_path = self.process.poll(), failure_path(self.born_in, self.born_as)
        if code is not None:
            record = FailureRecord.read(record_path) if code else None
            when = record.time if record else time.time() - _NOTICE_S
            self.ending = Ending(self.rank, code, when, self.process.log_path, record, self.process.ended_by_us)
        elif record_path.exists():
            self._failing_since = self._failing_since or time.monotonic()
            if time.monotonic() - self._failing_since > _EXIT_GRACE_S:
                record = FailureRecord.read(record_path)
                assert record is not None
                self.process.end(signal.SIGKILL)
                self.ending = Ending(self.rank, record.exit_code, record.time, self.process.log_path, record)

    def judge(self) -> None:
        """Whether it ended too early, now that everything it said before is known."""
        if self.ending is None or self.ending.code != 0 or self.ending.is_early or not self.ending.in_loop:
            return
        if self.joined is None:
            self.ending = replace(self.ending, in_loop=False)
        elif self.joined.in_run:
            self.ending = replace(self.ending, early_at=self.beat.step if self.beat is not None else 0)


class Crew:
    """The members of this node; `begin` makes of them the next world's."""

    def __init__(
        self,
        environ: Mapping[str, str],
        python: str,
        *,
        preload: tuple[str, ...] | None = None,
        with_control: bool = True,
        frees_devices: bool = False,
        on_started: Callable[[Member], None] = lambda member: None,
        door: Callable[[], StoreDoor] | None = None,
    ) -> None:
        """`preload`: the modules that the parent of all ranks imports; None: every rank is started by itself.
        `frees_devices`: those who leave must be gone before others come, who need their memory. `door`: where the ranks
        meet; told to them beside what is rendered, which is shown to users."""
        self._environ, self._python, self._preload, self._with_control = environ, python, preload, with_control
        self._frees_devices = frees_devices
        self._door = door
        self._parent: WarmParent | None = None
        self._on_started = on_started
        self.members: list[Member] = []
        self._leaving: list[RankProcess] = []  # of earlier worlds; they are being ended

    def begin(self, rendered: Rendered, slots: Iterable[int]) -> None:
        """The next world: one member for each rank of `rendered`, in the order of the slots."""
        make_private(rendered.attempt_dir)
        pairs = list(zip(rendered.processes, slots, strict=False))
        is_lost = any(member.role.is_vital and member.ending is not None for member in self.members)
        able = [] if is_lost else [member for member in self.members if member.can_go_on]
        staying = {m.slot: m for m in able if m.slot in {slot for _, slot in pairs}}
        for member in self.members:
            if member.slot not in staying or staying[member.slot] is not member:
                member.process.end(signal.SIGKILL)
                self._leaving.append(member.process)
        if self._frees_devices:
            end_all(self._leaving, 0.0)
        self.members = []
        for spec, slot in pairs:
            if slot in staying:
                member = staying[slot]
                member.rank, member.attempt_dir = spec.rank, rendered.attempt_dir
                member.tell(World(dict(spec.env) | self._secrets()))
                self.members.append(member)
            else:
                self.members.append(self._start(rendered, spec, slot))

    def _start(self, rendered: Rendered, spec: ProcessSpec, slot: int) -> Member:
        failure_path(rendered.attempt_dir, spec.rank).unlink(missing_ok=True)
        environ = dict(self._environ) | dict(spec.env) | self._secrets() | {LAUNCHER_PID: str(os.getpid())}
        try:
            process = self._make(rendered, spec, environ)
        except OSError as error:
            raise LaunchError(
                f"rank {spec.rank} could not be started",
                why=str(error),
                do=f"check that {rendered.run_dir} can be written and that {self._python} runs",
            ) from error
        member = Member(process, slot, spec.rank, rendered.attempt_dir, rendered.attempt_dir, spec.rank, spec.role)
        self._on_started(member)
        return member

    def _secrets(self) -> dict[str, str]:
        return {} if self._door is None else self._door().to_environ()

    def _make(self, rendered: Rendered, spec: ProcessSpec, environ: Mapping[str, str]) -> RankProcess:
        if self._preload is None or not WarmParent.is_supported():
            return RankProcess(spec, environ, with_control=self._with_control)
        if self._parent is None or not self._parent.is_alive:
            log_path = os.path.join(rendered.attempt_dir, "parent.log")
            self._parent = WarmParent(self._python, environ, self._preload, log_path=log_path)
        return self._parent.start(spec, environ, self._with_control)

    def hear(self) -> list[tuple[Member, Message]]:
        """What the members said; what they said of themselves is noted on them."""
        heard = [(member, message) for member in self.members for message in member.hear()]
        for member, message in heard:
            if isinstance(message, Joined):
                member.joined = message
            elif isinstance(message, Lost):
                member.lost, member.lost_message = message.attempt, message.message
        for member in self.members:
            member.judge()
        return heard

    def notice(self) -> None:
        for member in self.members:
            member.notice()
        self._leaving = [process for process in self._leaving if not process.is_gone()]

    def tell(self, message: Message) -> None:
        for member in self.members:
            member.tell(message)

    def wait(self, seconds: float) -> None:
        """Until a member says something or ends, or for so long."""
        living = [member for member in self.members if member.ending is None]
        lines: list[Any] = [member.process.control for member in living if member.process.control is not None]
        if self._parent is not None and self._parent.is_alive:
            lines.append(self._parent)  # it tells who has ended
        else:
            seconds = min(seconds, _UNTOLD_S)
        poll = select.poll()  # unlike select, for any number of open files: the store has a connection for each rank
        for line in lines:
            poll.register(line, select.POLLIN)
        poll.poll(seconds * 1000)

    @property
    def steps(self) -> dict[int, int]:
        """Steps that each rank has finished, where it has begun."""
        return {member.rank: beat.step for member in self.members if (beat := member.beat) is not None}

    def end(self, grace_s: float) -> None:
        """All of them, with everything that they started."""
        end_all([*(member.process for member in self.members), *self._leaving], grace_s)
        self.notice()

    def close(self) -> None:
        self.end(0.0)
        if self._parent is not None:
            self._parent.close()
        for member in self.members:
            if member.process.control is not None:
                member.process.control.close()
