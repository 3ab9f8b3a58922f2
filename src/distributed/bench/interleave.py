"""Ranks that wait for their turn: started once, told over a socket what to run next, asleep in between."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from distributed.core.engines import ENGINES
from distributed.core.errors import LaunchError
from distributed.core.registry import load_target
from distributed.launch.request import LaunchRequest

BLOCK = 50  # steps; one of them is logged, so that all blocks have the same work
TURN_TIMEOUT_S = 300.0  # a turn takes about a second
_END_S = 10.0  # for ranks to end when the benchmark does not go on
_LOOK_S = 1.0  # how often to see whether a rank that should come has failed


class Reading(NamedTuple):
    """What one rank's timed steps took, in µs a step."""

    cpu_us: float  # user and system time of the whole process, all threads
    wall_us: float
    python_us: float  # CPU time of its Python threads alone, without gloo's, which do the same for everybody
    best_python_us: float  # of the cheapest block of steps


class RunInThread:
    """A run by a launcher that only comes back when it is over."""

    def __init__(self, run: Callable[[LaunchRequest], None], request: LaunchRequest) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(run, request), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[LaunchRequest], None], request: LaunchRequest) -> None:
        try:
            run(request)
        except BaseException as error:  # raised where somebody waits for it
            self._error = error

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._thread.join(_END_S)  # the ranks end when nobody tells them anything any more


@contextmanager
def answering(port: int, rank: int) -> Iterator[TextIO]:
    """A rank's side: the line over which it is told what to do, after it has said who it is."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        channel = connection.makefile("rw", encoding="utf-8", newline="\n")
        answer(channel, rank)
        yield channel


def answer(channel: TextIO, what: Any) -> None:
    channel.write(json.dumps(what) + "\n")
    channel.flush()


def room_for(engine: str, ranks: int) -> AbstractContextManager[object]:
    """What the ranks of several contenders share while they wait: for Ray, a cluster on this machine."""
    if hasattr(_launcher(engine), "submit"):
        return nullcontext()
    return load_target("distributed.launch.ray_cluster:connected")(None, ranks, "cpu")  # type: ignore[no-any-return]


def _launcher(engine: str) -> Any:
    return load_target(ENGINES.require(engine).starts)()


def _submit(engine: str, request: LaunchRequest) -> Any:
    launcher = _launcher(engine)
    return launcher.submit(request) if hasattr(launcher, "submit") else RunInThread(launcher.run, request)


class WaitingRanks:
    """The processes of one contender: a world of its own, so that what it imports burdens nobody else."""

    def __init__(
        self,
        contender: str,
        ranks: int,
        command: Sequence[str],
        folder: str,
        engine: str = "pytorch-ddp",
        device: str = "cpu",
        preload: tuple[str, ...] = (),
    ) -> None:
        """`command`: the module that a rank runs and its arguments, which the port to call follows.

        `preload`: modules that are imported once and not in every rank, which are then forked.
        """
        self._contender, self._server = contender, socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(_LOOK_S)
        port = self._server.getsockname()[1]
        request = LaunchRequest(
            command=("-m", *command, str(port)),
            run_dir=os.path.join(folder, contender),
            ranks_per_node=ranks,
            env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if device == "cpu" else {},
            device=device,
            warm=bool(preload),
            preload=preload,
        )
        self._ranks, self._attempt_dir = ranks, Path(request.run_dir, "attempts", "0")
        self._job = _submit(engine, request)
        self._channels: list[TextIO] = []

    def __enter__(self) -> WaitingRanks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._hang_up()
        if error is None:
            self._job.wait()
        else:
            self._job.close()

    def connect(self) -> None:
        """Wait until all of them have imported what they need; only the first call has to."""
        if self._channels:
            return
        by_rank: dict[int, TextIO] = {}
        for _ in range(self._ranks):
            connection = self._accept()
            connection.settimeout(TURN_TIMEOUT_S)
            with connection:
                channel = connection.makefile("rw", encoding="utf-8", newline="\n")
            by_rank[json.loads(channel.readline())] = channel
        self._channels = [by_rank[rank] for rank in sorted(by_rank)]

    def take_turn(self, names: Sequence[str]) -> list[list[Reading]]:
        """Run these contenders one after the other on these ranks: the reading of each, by rank."""
        return [[Reading(*figures) for figures in answer] for answer in self.ask(list(names))]

    def ask(self, what: Any) -> list[Any]:
        """Tell all ranks the same, as JSON, and wait for their answers, by rank."""
        for channel in self._channels:
            answer(channel, what)
        answers = []
        for channel in self._channels:
            try:
                line = channel.readline()
            except TimeoutError:
                raise self._silent() from None
            if not line:  # it ended: its launcher knows why
                self._job.wait()
                raise LaunchError(f"a rank of {self._contender} ended before its turn was over")
            answers.append(json.loads(line))
        return answers

    def _accept(self) -> socket.socket:
        deadline = time.monotonic() + TURN_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                return self._server.accept()[0]
            except TimeoutError:
                if any(self._attempt_dir.glob("failure-*.json")):
                    self._job.wait()  # raises what the first rank to fail said
        raise self._silent()

    def _hang_up(self) -> None:
        """The ranks end when nobody listens any more."""
        for channel in self._channels:
            channel.close()
        self._server.close()

    def _silent(self) -> LaunchError:
        return LaunchError(
            f"a rank of {self._contender} said nothing for {TURN_TIMEOUT_S:.0f} s",
            why=f"its logs are in {self._attempt_dir}",
            do="leave it out with --only, or take fewer --steps",
        )
