"""AgentLine: this rank's end of the socket to the launcher that started it."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from distributed.core.engines.launchers import launcher_of
from distributed.core.env import WorkerEnv, control_fd, worker_env
from distributed.core.protocol.gpu_memory import write_memory
from distributed.core.protocol.rank_protocol import (
    Close,
    Closed,
    Dump,
    Joined,
    LauncherLink,
    Leave,
    Measure,
    Message,
    World,
    decode,
    encode,
)
from distributed.core.registry import load_target

_CUT_EVERY_S = 0.05


class AgentLine:
    """A thread listens; nothing that it hears touches the main thread, save that a collective may be cut off."""

    replaces = True
    closes_gates = True

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._worlds: SimpleQueue[WorkerEnv | None] = SimpleQueue()
        self._leave: Leave | None = None
        self._left = -1  # the last attempt that this rank is out of
        self._world_since_ns = 0  # when this rank joined the world that it is in
        self._lock = threading.Lock()
        self._sending, self._dumping = threading.Lock(), threading.Lock()
        self.regroups = False
        self._end_collective: Callable[[], None] = lambda: None
        self._closing = threading.Lock()
        self._closed = -1  # the last attempt of which no step counts any more
        self._gate: tuple[int, Callable[[], None]] = (-1, lambda: None)  # the attempt, and what closes its gate
        self._thread = threading.Thread(target=self._listen, name="agent-line", daemon=True)
        self._thread.start()

    def tell(self, message: Message) -> None:
        if isinstance(message, Joined):
            self.regroups = message.regroups
        with suppress(OSError), self._sending:  # the launcher is gone, and the kernel will end this rank
            self._line.sendall(encode(message))

    def on_cut_off(self, end: Callable[[], None]) -> None:
        self._end_collective = end

    def cut_off(self) -> None:
        self._end_collective()

    def on_close(self, attempt: int, close: Callable[[], None]) -> None:
        """The message may have come before this rank had a gate."""
        with self._closing:
            self._gate = (attempt, close)
            if self._closed >= attempt:
                close()

    def asked_to_leave(self, attempt: int) -> bool:
        """Whether this attempt shall end at the next step that all agree on."""
        return self._leave is not None and self._leave.attempt == attempt

    def is_cut_off(self, attempt: int) -> bool:
        """Whether this attempt is over, wherever this rank stands in it."""
        return self._leave is not None and self._leave.attempt >= attempt and not self._leave.in_order

    def next_world(self, after_attempt: int) -> WorkerEnv | None:
        """Wait for the world after this attempt; None when there will be none."""
        self._is_out_of(after_attempt)
        while True:
            world = self._worlds.get()
            if world is None or world.attempt > after_attempt:
                world = self._newest(world)
                self._world_since_ns = time.time_ns()
                self._is_out_of(world.attempt - 1 if world is not None else after_attempt)
                return world

    def _is_out_of(self, attempt: int) -> None:
        with self._lock:
            self._left = max(self._left, attempt)

    def _newest(self, world: WorkerEnv | None) -> WorkerEnv | None:
        """While this rank was busy, the launcher may have made more than one."""
        while world is not None:
            try:
                world = self._worlds.get_nowait()
            except Empty:
                return world
        return None

    def _listen(self) -> None:
        with suppress(OSError), self._line.makefile("rb") as lines:
            for line in lines:
                self._hear(decode(line))
        self._worlds.put(None)

    def _hear(self, message: Message | None) -> None:
        if isinstance(message, World):
            self._worlds.put(worker_env(message.environ))
        elif isinstance(message, Close):
            self._close(message.attempt)
            self.tell(Closed(message.attempt))
        elif isinstance(message, Leave):
            self._leave = message
            if not message.in_order:
                threading.Thread(target=self._keep_cut_off, args=(message,), name="cut-off", daemon=True).start()
        elif isinstance(message, Dump | Measure):  # which may take seconds, or hang with the device
            threading.Thread(target=self._report, args=(message,), name="rank-report", daemon=True).start()

    def _report(self, asked: Dump | Measure) -> None:
        with suppress(Exception):  # of a disk that is full, or torch's: the run does not need it
            if isinstance(asked, Measure):
                write_memory(Path(asked.path), asked.rank)
                return
            from distributed.runtime.flight_recorder import write_collectives  # torch's, needed when a rank is stuck

            with self._dumping:  # the later one is to be the one that stays
                write_collectives(asked.path, self._world_since_ns)

    def _close(self, attempt: int) -> None:
        with self._closing:
            self._closed = max(self._closed, attempt)
            of_attempt, close = self._gate
            if of_attempt <= attempt:
                close()

    def _keep_cut_off(self, leave: Leave) -> None:
        """Until this rank is out: when the message came, it may have been about to connect or to begin a collective."""
        while True:
            with self._lock:
                if self._left >= leave.attempt:
                    return
                self.cut_off()
            time.sleep(_CUT_EVERY_S)


@functools.cache
def agent_line() -> AgentLine | None:
    """The line of this process, if our launcher started it."""
    fd = control_fd()
    return None if fd is None else AgentLine(socket.socket(fileno=fd))


def launcher_line() -> LauncherLink | None:
    """The line of this process to the launcher that started it: ours, or that of an engine."""
    own, env = agent_line(), worker_env()
    links = launcher_of(env.launcher).links if own is None and env is not None else ""
    line: LauncherLink | None = load_target(links)() if links else own
    return line
