"""Warm worlds: processes that stay, rank by rank, and train case after case in one process group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.adversarial.rank import Answer, Phase, serve_rank, serve_reference

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.adversarial.preload"])
_GRACE_S = 5.0  # for the other ranks, after one has answered with an error


class Processes:
    """Processes that are asked the same and answer each for itself."""

    def __init__(self, functions: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self._links: list[Connection] = []
        self._processes = []
        for function, arguments in functions:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=function, args=(theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def ask(self, question: Any) -> None:
        for link in self._links:
            link.send_bytes(pickle.dumps(question))

    def answers(self, timeout_s: float) -> list[Answer | None]:
        """In the order of the ranks; None of one that did not answer in time."""
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(self._links):
            open_links = [link for index, link in enumerate(self._links) if index not in found]
            ready = wait(open_links, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for link in ready:
                index = self._links.index(link)  # type: ignore[arg-type]
                try:
                    found[index] = pickle.loads(link.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    found[index] = Answer("failed", None, "the process ended")
                if found[index].kind != "trained":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return [found.get(index) for index in range(len(self._links))]

    def dump_stacks(self) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.3)

    def end(self) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.kill()
            process.join()


class World(Processes):
    """The ranks of one world."""

    def __init__(self, ranks: int, folder: Path) -> None:
        port = _free_port()
        self.log = folder / f"world-{ranks}-{port}.log"
        super().__init__([(serve_rank, (rank, ranks, port, str(self.log))) for rank in range(ranks)])
        self.phases = 0

    def train(self, phase: Phase, timeout_s: float) -> list[Answer | None]:
        self.phases += 1
        self.ask(phase)
        return self.answers(timeout_s)


class Reference(Processes):
    """The process that trains plainly."""

    def __init__(self, folder: Path) -> None:
        super().__init__([(serve_reference, (str(folder / "reference.log"),))])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
