"""Agents of nodes as small processes, without ranks: a test tells each what to do and reads what it says."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

Said = dict[str, Any]
TOKEN = "the token of these agents"


class Agent:
    """One agent process. `until` waits for something it says; what was said before that is kept in `said`."""

    def __init__(
        self, name: str, port: int, *, on: Sequence[str] = (), host: str = "127.0.0.1", **options: Any
    ) -> None:
        self.name = name
        self.said: list[Said] = []
        words = [*on, sys.executable, str(Path(__file__)), json.dumps({"host": host, "port": port} | options)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[Said] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        if error is not None:
            print(f"{self.name} said {self.said}")

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def do(self, what: str, **arguments: Any) -> Agent:
        assert self.process.stdin is not None
        print(json.dumps({"do": what} | arguments), file=self.process.stdin, flush=True)
        return self

    def until(self, *words: str, timeout_s: float = 40.0) -> Said:
        """The next thing it says that has one of these words, as key or as kind of news."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                said = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.name} did not say {words} in {timeout_s} s, but {self.said}") from None
            self.said.append(said)
            if any(word in said or said.get("kind") == word for word in words):
                return said

    def gather(self, attempt: int = 0, sizes: Sequence[int] = ()) -> Agent:
        return self.do("gather", attempt=attempt, sizes=list(sizes))

    def met(self, timeout_s: float = 40.0) -> Said:
        return self.until("attempt", timeout_s=timeout_s)


def main() -> None:
    from distributed.core.errors import LaunchError
    from distributed.launch.rendezvous.elastic import elastic_nodes
    from distributed.launch.rendezvous.nodes import News
    from distributed.launch.request import LaunchRequest

    options = json.loads(sys.argv[1])
    request = LaunchRequest(
        ("x.py",),
        options.pop("run_dir", "runs/x"),
        options.pop("ranks", 1),
        num_nodes=options.pop("num_nodes", 2),
        min_nodes=options.pop("min_nodes", None),
        max_nodes=options.pop("max_nodes", None),
        node_rank=options.pop("node_rank", None),
        master_addr=options.pop("host"),
        master_port=options.pop("port"),
        join_token=options.pop("join_token", TOKEN),
    )
    nodes = elastic_nodes(request, **options)
    orders: queue.SimpleQueue[Said] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os._exit(0)  # the test is gone

    threading.Thread(target=read, daemon=True).start()
    told_newcomer = False
    while True:
        try:
            order = orders.get(timeout=0.02)
        except queue.Empty:
            order = {"do": ""}
        what, began = order.pop("do"), time.monotonic()
        try:
            if what == "gather":
                told_newcomer = False
                met = nodes.gather(order["attempt"], order["sizes"])
                say(asdict(met) | {"took_s": time.monotonic() - began})
            elif what == "tell":
                nodes.tell(News(**order))
            elif what == "leave":
                news = nodes.leave(order["ok"])
                say({"left": asdict(news) if news else None})
        except LaunchError as error:
            say({"error": str(error), "of": type(error).__name__})
        news = nodes.news()
        if news is not None:
            say(asdict(news) | {"at": time.monotonic()})
        if not told_newcomer and nodes.newcomer():
            told_newcomer = True
            say({"newcomer": True, "at": time.monotonic()})


def say(what: Said) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
