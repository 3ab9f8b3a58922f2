"""Ranks without processes: a clock that a test moves, a kernel whose processes are objects, and nodes that say what
they are told to. The launcher's own code runs as it is, in milliseconds."""

from __future__ import annotations

import heapq
import itertools
import json
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distributed.core.env import StoreDoor, WorkerEnv, worker_env
from distributed.core.events import Event, parse_event
from distributed.core.protocol.failure import FailureRecord
from distributed.core.protocol.gpu_memory import GpuMemory
from distributed.core.protocol.heartbeat import RECORD, Phase
from distributed.core.protocol.rank_protocol import (
    Close,
    Closed,
    Dump,
    Joined,
    Leave,
    Lost,
    Measure,
    Message,
    Resumed,
    World,
    decode,
    encode,
)
from distributed.core.run_dir import AttemptDir, RunDir
from distributed.launch.clock import Clock, HasFileno, Timings
from distributed.launch.local import LocalLauncher
from distributed.launch.node.kernel import Child, Kernel
from distributed.launch.node.log_mirror import LogMirror
from distributed.launch.node.rank_group import RankGroup
from distributed.launch.rendezvous.nodes import Alone, News, Nodes, Round, StoppedWaiting
from distributed.launch.request import LaunchRequest, NodePlace, ProcessSpec
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.launch.supervise.supervisor import Supervisor

_FIRST_PID = 1 << 30  # above any that a kernel gives
_LONGEST_S = 60.0
STEP_S = 0.1

Behaviour = Callable[["FakeRank"], None]


class FakeClock(Clock):
    """Its time passes only while somebody waits; what was to happen by then happens."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.on_wait: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    def time(self) -> float:
        return 1_700_000_000.0 + self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), action))

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self._happen()
        self.now = end
        self.on_wait()

    def wait(self, lines: Sequence[HasFileno], seconds: float) -> None:
        """As a line that has something to read does, what happens ends the wait."""
        assert self.now < 1000.0 + _LONGEST_S, "nothing ends this run"
        self.on_wait()
        if self._due and self._due[0][0] <= self.now + seconds:
            self._happen()
        else:
            self.now += seconds
        self.on_wait()

    def _happen(self) -> None:
        when, _, action = heapq.heappop(self._due)
        self.now = max(self.now, when)
        action()


class FakeRank:
    """A process that runs our loop as far as its launcher can see; what it does in a world, a test's function says."""

    started = True

    why_never_started = ""

    def __init__(self, machine: FakeKernel, spec: ProcessSpec, environ: Mapping[str, str], line: socket.socket) -> None:
        self.pid, self.ended_by_us, self.code = next(machine.pids), False, None
        self._machine, self._line, self._heard = machine, line.dup(), b""
        self.environ, self.env = dict(environ), _place(environ)
        self.born_as, self.born_in = self.env.rank, self.env.attempt
        self.state, self.is_stuck, self.is_waiting = "S", False, False
        self.step = 0
        self.heard: list[Message] = []
        self.heard_at: list[float] = []
        self.signals: list[int] = []
        self.ignores: set[int] = set()
        self.on_signal: dict[int, Callable[[], None]] = {}
        self.stack = ""  # what it answers when it is asked where it stands
        self.leaves_in_order = True
        self.leaves_after_s: float | None = 0.0  # when it is told to leave at once; None: it does not
        self.closes_after_s: float | None = 0.0  # None: it does not answer
        self.regroups = False
        self.holds = True  # the state of the run, when it leaves a world
        self._asked_to_leave = -1
        self._left = -1
        self._next: Mapping[str, str] = {}  # the world that it was told to join and has not yet

    # The Child that RankProcess sees.

    def poll(self) -> int | None:
        return self.code

    def cancel(self) -> None:
        """It is started already."""

    # What a test has it do.

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def attempt(self) -> int:
        return self.env.attempt

    @property
    def folder(self) -> AttemptDir:
        assert self.env.run_dir is not None
        return RunDir(self.env.run_dir).attempt(self.attempt)

    def after(self, seconds: float, action: Callable[..., None], *given: Any, **more: Any) -> None:
        """Unless it has ended, hangs, or is in another world by then."""
        attempt = self.attempt

        def act() -> None:
            if self.answers and self.attempt == attempt:
                action(*given, **more)

        self._machine.clock.after(seconds, act)

    def say(self, message: Message) -> None:
        self._line.sendall(encode(message))

    def joins(self, *, regroups: bool = True, **more: Any) -> None:
        self.regroups = regroups
        self.say(Joined(regroups, in_run=True, **more))
        self.beat(self.step, Phase.STARTING)
        if self._asked_to_leave == self.attempt:
            self.after(STEP_S, self._leaves)

    def resumes(self, step: int) -> None:
        if self.rank == 0:
            self.say(Resumed(self.attempt, step, f"memory of step {step}" if step else "the beginning"))

    def beat(self, step: int, phase: Phase = Phase.TRAINING, collective: str = "") -> None:
        self.step = step
        now = self._machine.clock.monotonic_ns()
        record = RECORD.pack(step, now, int(phase), round(STEP_S * 1e9), collective.encode())
        self.folder.heartbeat(self.rank).write_bytes(record)

    def trains(
        self, until: int, *, first: int | None = None, then: Callable[[], None] | None = None, **joins: Any
    ) -> None:
        """Joins, resumes, takes a step each 0.1 s up to `until`, and ends well; in later worlds all
        begin with what the survivor that is furthest hands over."""
        living = [rank.step for rank in self._machine.ranks if rank.code is None]
        self.step = max([self.step, *living]) if first is None else first
        self.joins(**joins)
        self.resumes(self.step)
        for number, step in enumerate(range(self.step + 1, until + 1), 1):
            self.after(number * STEP_S, self._takes_step, step)
        self.after((until - self.step + 1) * STEP_S, self._comes_to_end, then or self.finishes)

    def _takes_step(self, step: int) -> None:
        """Together with the others: where one of them is gone or hangs, it waits in a collective."""
        peers = [rank for rank in self._machine.ranks if rank.attempt == self.attempt and rank is not self]
        if not self.is_waiting and any(not peer.answers for peer in peers):
            self.waits_for_others()
        if not self.is_waiting:
            self.beat(step)

    def waits_for_others(self) -> None:
        self.is_waiting = True
        self.beat(self.step, collective="gradients")

    def loses_world(self, message: str) -> None:
        """It waits for the next one."""
        self.is_waiting, self._left = True, self.attempt
        self.say(Lost(self.attempt, message, self.holds))

    def _comes_to_end(self, then: Callable[[], None]) -> None:
        if not self.is_waiting:
            then()

    @property
    def answers(self) -> bool:
        return self.code is None and self.state == "S" and not self.is_stuck

    def trained(self) -> None:
        """The end of training; the script goes on."""
        self.say(Joined(False, is_done=True))

    def finishes(self) -> None:
        """The end of training, and at once of the script."""
        self.trained()
        self.exits(0)

    def exits(self, code: int) -> None:
        if self.code is None:
            self.code, self.state = code, "X"
            self._line.close()

    def dies(self, number: int = signal.SIGKILL) -> None:
        self.exits(-number)

    def fails(
        self, kind: str = "ValueError", message: str = "boom", *, exit_code: int = 1, collateral: bool = False
    ) -> None:
        """An exception that nobody caught, as `launch/node/rank.py` writes it down."""
        self.writes_failure(kind, message, exit_code=exit_code, collateral=collateral)
        self.exits(exit_code)

    def writes_failure(
        self, kind: str = "ValueError", message: str = "boom", *, exit_code: int = 1, collateral: bool = False
    ) -> None:
        trace = f'Traceback (most recent call last):\n  File "train.py", line 3, in step\n{kind}: {message}\n'
        record = FailureRecord(
            self.rank, "here", self.pid, self._machine.clock.time(), kind, message, trace, exit_code, collateral
        )
        assert self.env.run_dir is not None
        record.write(RunDir(self.env.run_dir).attempt(self.born_in).failure(self.born_as))

    def runs_out_of_memory(self) -> None:
        """Of its GPU, and leaves behind what it had of it."""
        assert self.env.run_dir is not None
        self._writes_memory(RunDir(self.env.run_dir).attempt(self.born_in).memory(self.born_as), self.rank)
        self.fails("OutOfMemoryError", "CUDA out of memory.")

    def _writes_memory(self, path: Path, rank: int) -> None:
        held = (10 + rank) * 2**30
        told = GpuMemory(rank, self.pid, "gpu-0", "H200", 40 * 2**30, 2**30, held, held, held)
        path.write_text(json.dumps([asdict(told)]))

    def hangs(self) -> None:
        """In user code: it takes no step, and tells where it stands when it is asked."""
        self.is_stuck = True
        self.stack = 'Current thread 0x7f (most recent call first):\n  File "/home/u/train.py", line 7 in forward\n'

    # What its launcher does to it.

    def gets(self, number: int) -> None:
        if self.code is not None:
            raise ProcessLookupError
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.exits(-number)
        elif number == signal.SIGUSR2:
            assert self.env.run_dir is not None
            with RunDir(self.env.run_dir).attempt(self.born_in).stack(self.born_as).open("a") as file:
                file.write(self.stack)
        elif number in self.on_signal:
            self.on_signal[number]()
        elif number not in self.ignores:
            self.exits(-number)

    def reads(self) -> None:
        """What its launcher has told since; it leaves and goes on as a rank of ours does."""
        if self.code is not None or self.state != "S":
            return
        try:
            while part := self._line.recv(65536, socket.MSG_DONTWAIT):
                self._heard += part
        except BlockingIOError:
            pass
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            message = decode(line)
            assert message is not None
            self.heard.append(message)
            self.heard_at.append(self._machine.clock.now)
            self._acts_on(message)

    def _acts_on(self, message: Message) -> None:
        match message:
            case Leave(attempt, in_order) if attempt == self.attempt and self.leaves_in_order >= in_order:
                self._asked_to_leave = attempt
                after_s = STEP_S if in_order else self.leaves_after_s
                if self.regroups and not self.is_stuck and after_s is not None:
                    self.after(after_s, self._leaves)
            case Close(attempt) if self.closes_after_s is not None:
                self.after(self.closes_after_s, self.say, Closed(attempt))
            case World(environ):
                self._next = environ
                if not self.regroups or self._asked_to_leave < self.attempt or self._left == self.attempt:
                    self._goes_on()
            case Dump(path):
                Path(path).write_text("{}")
            case Measure(path, rank):
                self._writes_memory(Path(path), rank)

    def _leaves(self) -> None:
        self.loses_world("left")
        if self._next:
            self._goes_on()

    def _goes_on(self) -> None:
        self.env, self.is_waiting, self._next = _place(self._next), False, {}
        self._machine.behave(self)


def _place(environ: Mapping[str, str]) -> WorkerEnv:
    env = worker_env({name: value for name, value in environ.items() if not name.startswith("SLURM_")})
    assert env is not None
    return env


class FakeKernel(Kernel):
    """Its processes are FakeRanks; `behave` is called for each in every world that it is in."""

    def __init__(self, clock: FakeClock, behave: Behaviour) -> None:
        self.clock, self.behave = clock, behave
        self.pids = itertools.count(_FIRST_PID)
        self.ranks: list[FakeRank] = []  # all that were ever started
        clock.on_wait = self._let_them_read

    def start(self, spec: ProcessSpec, environ: Mapping[str, str], log: int, control: socket.socket | None) -> Child:
        assert control is not None
        rank = FakeRank(self, spec, environ, control)
        self.ranks.append(rank)
        self.behave(rank)
        return rank

    def kill(self, pid: int, number: int) -> None:
        self._by_pid(pid).gets(number)

    def kill_group(self, group: int, number: int) -> None:
        self._by_pid(group).gets(number)

    def group_runs(self, group: int) -> bool:
        return self._by_pid(group).code is None

    def state(self, pid: int) -> str:
        return self._by_pid(pid).state

    def sleeps_in(self, pid: int) -> str:
        return ""

    def handles(self, pid: int, number: int) -> bool:
        return True

    def forks(self, pid: int) -> list[int]:
        return []

    def _by_pid(self, pid: int) -> FakeRank:
        return self.ranks[pid - _FIRST_PID]

    def _let_them_read(self) -> None:
        for rank in list(self.ranks):
            rank.reads()


class FakeNodes:
    """The other nodes of a run, as far as this one sees them: what they say, and when."""

    def __init__(self, clock: FakeClock, request: LaunchRequest, *, node_rank: int = 0, num_nodes: int = 2) -> None:
        self._clock, self._request = clock, request
        self.node_rank, self.num_nodes = node_rank, num_nodes
        self.told: list[News] = []
        self.left: list[bool] = []
        self.gathered: list[tuple[int, int | None]] = []
        self.late: list[News] = []  # what is said while this node waits at its end
        self.waits = False  # a newcomer
        self.stays_away = False  # nobody comes to the next meeting
        self.lost: set[int] = set()  # nodes of the last round
        self._said: list[News] = []
        self._restarts = 0

    def say(self, news: News, after_s: float = 0.0) -> None:
        self._clock.after(after_s, lambda: self._said.append(news))

    def gather(
        self,
        attempt: int,
        sizes: Sequence[int] = (),
        ranks: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Round:
        self.gathered.append((attempt, ranks))
        while self.stays_away:
            if is_stopped():
                raise StoppedWaiting
            self._clock.wait([], 1.0)
        self.waits = False  # it is met
        own = self._request.ranks_per_node if ranks is None else ranks
        place = NodePlace(
            self.node_rank,
            self.num_nodes,
            rank_offset=self.node_rank * own,
            world_size=self.num_nodes * own,
            master_addr="127.0.0.1",
            master_port=29500,
            ranks=own,
        )
        self._restarts += 1
        hosts = tuple(f"n{number}" for number in range(self.num_nodes))
        return Round(attempt, self._restarts - 1, place, hosts, self._request.run_dir)

    def tell(self, news: News) -> None:
        self.told.append(news)

    def news(self) -> News | None:
        return self._said.pop(0) if self._said else None

    def all_come(self, *, node_rank: int) -> None:
        """To the meeting at which this node waits."""
        self.node_rank, self.stays_away, self.lost = node_rank, False, set()

    def newcomer(self) -> bool:
        return self.waits

    def is_first(self) -> bool:
        return self.lost.issuperset(range(self.node_rank))

    def leave(self, ok: bool, is_stopped: Callable[[], bool] = lambda: False) -> News | None:
        self.left.append(ok)
        return self.late.pop(0) if self.late else None

    def door(self) -> StoreDoor:
        raise NotImplementedError

    def close(self) -> None:
        pass


class FakeRun:
    """A supervisor over fake ranks. `run` it; then see what it started, told and wrote."""

    def __init__(
        self,
        folder: Path,
        behave: Behaviour,
        *,
        ranks: int = 2,
        limits: RestartLimits | None = None,
        nodes: Callable[[FakeClock, LaunchRequest], Nodes] | None = None,
        timings: Timings | None = None,
        frees_devices: bool = False,
        **request: Any,
    ) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.kernel = FakeKernel(self.clock, behave)
        self.request = LaunchRequest(("train.py",), str(folder), ranks, **request)
        self.nodes: Any = Alone(self.request) if nodes is None else nodes(self.clock, self.request)
        self.timings = timings or Timings(unwatched_poll_s=0.1)  # fewer looks, which cost what ranks do not
        launcher = LocalLauncher(environ={}, python="python")
        self.rank_group = RankGroup(
            {}, "python", frees_devices=frees_devices, kernel=self.kernel, clock=self.clock, timings=self.timings
        )
        self.supervisor = Supervisor(
            request=self.request,
            nodes=self.nodes,
            rank_group=self.rank_group,
            render=lambda round_, slots: launcher.render_round(self.request, round_, slots),
            mirror=LogMirror(None),
            limits=limits or RestartLimits(max_restarts=None),
            clock=self.clock,
            timings=self.timings,
        )
        self.states: list[str] = []  # that were seen, each once in a row

    def run(self) -> None:
        """To its end; raises what the user would see."""
        follow = self.clock.on_wait

        def look() -> None:
            name = type(self.supervisor.state).__name__
            if self.states[-1:] != [name]:
                self.states.append(name)
            follow()

        self.supervisor.start()
        self.clock.on_wait = look
        self.supervisor.wait()

    @property
    def ranks(self) -> list[FakeRank]:
        return self.kernel.ranks

    @property
    def events(self) -> list[Event]:
        path = RunDir(self.folder).events
        found = [parse_event(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in found if event is not None]

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def on(rank: FakeRank, number: int, attempt: int = 0) -> bool:
    """Whether this is that rank of that world."""
    return (rank.rank, rank.attempt) == (number, attempt)
