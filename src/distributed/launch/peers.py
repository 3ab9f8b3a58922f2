"""What nodes tell each other while they run: that one failed or is being stopped, and that each is still there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

_BEAT_S = 0.4
_LEAVE_S = 5.0  # for the others to hear why this node ends


@dataclass(frozen=True)
class News:
    """Something that happened on one node and ends the run on all."""

    node_rank: int  # -1: not known
    host: str
    kind: str  # "failed" or "stopping"
    message: str = ""
    rank: int = -1  # -1: the node itself
    log_path: str = ""
    exit_code: int = 1
    signal: int = 0


class Peers(Protocol):
    """The other nodes of a run."""

    def tell(self, news: News) -> None:
        """Say it to all; returns at once."""

    def news(self) -> News | None:
        """The next thing that another node said, or that became of it; never waits."""

    def leave(self, ok: bool) -> News | None:
        """This node has ended. If well, waits for the others, and returns the news if one of them failed after all."""


class KeyValueStore(Protocol):
    """The part of torch's stores that is used here."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


class NodeTalk:
    """Peers over a store that all nodes reach.

    A thread talks to the store, which may hang for as long as its timeout when a link is cut; the caller does not.
    """

    def __init__(
        self,
        store: KeyValueStore,
        node_rank: int,
        hosts: Sequence[str],
        *,
        keeps_store: bool = False,
        lost_after_s: float = 20.0,
    ) -> None:
        self._store = store
        self._keeps_store = keeps_store
        self._node_rank = node_rank
        self._hosts = tuple(hosts)
        self._lost_after_s = lost_after_s
        self._others = [node for node in range(len(hosts)) if node != node_rank]
        self._beats: dict[int, tuple[bytes, float]] = dict.fromkeys(self._others, (b"", time.monotonic()))
        self._heard = 0
        self._done: set[int] = set()
        self._outbox: SimpleQueue[News] = SimpleQueue()
        self._inbox: SimpleQueue[News] = SimpleQueue()
        self._leaving = threading.Event()
        self._ok = False
        self._thread = threading.Thread(target=self._talk, name="node-talk", daemon=True)
        self._thread.start()

    def tell(self, news: News) -> None:
        self._outbox.put(news)

    def news(self) -> News | None:
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def leave(self, ok: bool) -> News | None:
        self._ok = ok
        self._leaving.set()
        if not ok:
            self._thread.join(2 * _LEAVE_S)
            return None
        while self._thread.is_alive():
            self._thread.join(_BEAT_S)
            news = self.news()
            if news is not None and news.kind == "failed":
                return news
        news = self.news()
        return news if news is not None and news.kind == "failed" else None

    def _talk(self) -> None:
        beat = 0
        try:
            while not (self._leaving.is_set() and self._may_go()):
                beat += 1
                self._store.set(f"beat/{self._node_rank}", str(beat))
                self._send()
                self._hear()
                self._watch()
                time.sleep(_BEAT_S)
            self._depart()
        except RuntimeError as error:  # what torch's stores raise when the connection is lost
            # When this node is done, so may be the one that keeps the store.
            if not (self._leaving.is_set() and self._ok):
                gone = f"the node that keeps its store went away ({_first_line(error)})"
                self._inbox.put(News(-1, "", "failed", gone))

    def _may_go(self) -> bool:
        if not self._ok:
            return True
        if self._node_rank not in self._done:
            self._store.set(f"done/{self._node_rank}", "")
            self._done.add(self._node_rank)
        self._done |= {node for node in self._others if self._store.check([f"done/{node}"])}
        return len(self._done) == len(self._hosts) or not self._inbox.empty()

    def _depart(self) -> None:
        """Last words. The node that keeps the store goes last, as long as the others are about to go."""
        self._send()
        gone = self._store.add("left", 1)
        deadline = time.monotonic() + _LEAVE_S
        while self._keeps_store and gone < len(self._hosts) and time.monotonic() < deadline:
            time.sleep(0.05)
            gone = self._store.add("left", 0)

    def _send(self) -> None:
        while not self._outbox.empty():
            number = self._store.add("news", 1)
            self._store.set(f"news/{number}", json.dumps(asdict(self._outbox.get())))

    def _hear(self) -> None:
        said = self._store.add("news", 0)
        while self._heard < said:
            self._heard += 1
            news = News(**json.loads(self._store.get(f"news/{self._heard}")))
            if news.node_rank != self._node_rank:
                self._inbox.put(news)

    def _watch(self) -> None:
        """A node that was cut off or killed says nothing: its beats stop."""
        now = time.monotonic()
        for node in [node for node in self._others if node not in self._done]:
            key = f"beat/{node}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            before, since = self._beats[node]
            if beat != before:
                self._beats[node] = (beat, now)
            elif now - since > self._lost_after_s and not self._store.check([f"done/{node}"]):
                self._done.add(node)
                self._inbox.put(News(node, self._hosts[node], "failed", f"not heard of for {now - since:.0f} s"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
