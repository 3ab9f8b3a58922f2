"""Interleaved measurement: ranks are started once, get each turn over a socket, and sleep in between."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import quantiles
from typing import Any, TextIO

from distributed.core.engines.engine import ENGINES
from distributed.core.errors import LaunchError
from distributed.core.run_dir import RunDir
from distributed.launch.base import launcher_of
from distributed.launch.request import LaunchRequest

TURN_TIMEOUT_S = 300.0  # a turn takes about a second
_LOOK_S = 1.0  # how often to see whether a rank that should come has failed


def median_error(values: Sequence[float]) -> float:
    """The standard error of a median, from the quartiles, which a few wild rounds do not move.

    >>> round(median_error([-2.0, -1.0, 0.0, 1.0, 2.0]), 2)
    0.83
    """
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    sigma = (high - low) / 1.349
    return 1.2533 * sigma / len(values) ** 0.5


@contextmanager
def answering(port: int, rank: int) -> Iterator[TextIO]:
    """A rank's side: the channel that its turns come over, once it has named its rank."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        channel = connection.makefile("rw", encoding="utf-8", newline="\n")
        answer(channel, rank)
        yield channel


def answer(channel: TextIO, what: Any) -> None:
    channel.write(json.dumps(what) + "\n")
    channel.flush()


def room_for(engine: str, ranks: int) -> AbstractContextManager[object]:
    """What the ranks of several contenders share while they wait: for Ray, a cluster on this machine."""
    return launcher_of(ENGINES.require(engine)).reserve(ranks, "cpu")


class WaitingRanks:
    """The processes of one contender: a world of its own, so that what it imports slows no other."""

    def __init__(
        self,
        contender: str,
        *,
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
        self._ranks, self._attempt = ranks, RunDir(request.run_dir).attempt(0)
        self._job = launcher_of(ENGINES.require(engine)).submit(request)
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
                if self._attempt.has_failures():
                    self._job.wait()  # raises what the first rank to fail said
        raise self._silent()

    def _hang_up(self) -> None:
        """The ranks end when their socket is closed."""
        for channel in self._channels:
            channel.close()
        self._server.close()

    def _silent(self) -> LaunchError:
        return LaunchError(
            f"a rank of {self._contender} said nothing for {TURN_TIMEOUT_S:.0f} s",
            why=f"the rank did not answer in time; the logs of all ranks are in {self._attempt}",
            do="leave it out with --only, or take fewer --steps",
        )
