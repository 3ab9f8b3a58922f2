"""NodeChannel: the heartbeats, states and failures that agents report to each other through the store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from distributed.launch.rendezvous.nodes import News

ARRIVED, ROUND = "arrived", "round"  # keys: how many agents ever connected; the number of the newest round

_TICK_S = 0.1  # between reads of the messages
_BEAT_S = 0.4
_LEAVE_S = 5.0  # for the other nodes to read why this node ends
_FRESH_S = 2.0  # a waiting node has sent a heartbeat within this time

# An agent's state, as its heartbeats report it. An agent that has gone ended well, one that has left did not.
_WAITING, _IN, _DONE, _GONE, _LEFT = "waiting", "in", "done", "gone", "left"


class KeyValueStore(Protocol):
    """The methods of a StoreClient that are used here. A lost connection raises RuntimeError."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def read(self, keys: list[str], /) -> list[bytes | None]: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes, /) -> bytes: ...

    def cut(self) -> None: ...


@dataclass(frozen=True)
class _Seen:
    beat: bytes
    status: str
    since: float  # when it was first seen
    changed: float  # when the heartbeat last changed

    @property
    def moves(self) -> bool:
        return self.changed > self.since


class NodeChannel:
    """Messages between an agent and the others, over one connection to the store.

    A thread calls the store, and may hang forever when a link is cut; the caller never waits for it, and notices that.
    """

    def __init__(
        self,
        store: KeyValueStore,
        agent: int,
        *,
        keeps_store: bool = False,
        lost_after_s: float = 5.0,
        cut_off_after_s: float = 8.0,
    ) -> None:
        self._store = store
        self._agent = agent
        self._keeps_store = keeps_store
        self._lost_after_s = lost_after_s
        self._cut_off_after_s = cut_off_after_s
        self._round = 0
        self._agents: tuple[int, ...] = ()
        self._hosts: tuple[str, ...] = ()
        self._active: frozenset[int] = frozenset()
        self._reported: set[object] = set()
        self._early: list[tuple[int, News]] = []  # of rounds that other nodes entered before this one
        self._status, self._shown_status = _WAITING, ""
        self._seen: dict[int, _Seen] = {}
        self._over = self._has_looked = False
        self._heard = self._queued = self._sent = self._beats = 0
        self._outbox: SimpleQueue[tuple[int, News]] = SimpleQueue()
        self._inbox: SimpleQueue[News] = SimpleQueue()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._broken = ""
        self._steps = self._steps_before = 0
        self._looked_at = time.monotonic()
        self._silent_s = 0.0
        self.is_cut = False
        self._thread = threading.Thread(target=self._talk, name="node-talk", daemon=True)
        self._thread.start()

    def enter(self, number: int, agents: Sequence[int], hosts: Sequence[str], active: Sequence[int]) -> None:
        """Enter a round; `agents` are in the order of the node ranks, and the `active` ones run ranks."""
        with self._lock:
            self._forget_last_round()
            self._round, self._agents, self._hosts = number, tuple(agents), tuple(hosts)
            self._active = frozenset(active)
            self._reported = set()
            now = time.monotonic()
            for agent in self._agents:
                seen = self._seen.get(agent, _Seen(b"", _IN, now, now))
                if seen.status != _LEFT:  # it had a heartbeat a moment ago
                    self._seen[agent] = _Seen(seen.beat, _IN, now, now)
            early, self._early = self._early, []
            for of_round, news in early:
                self._sort(of_round, news)
        self._show(_IN)

    def _forget_last_round(self) -> None:
        kept = []
        with suppress(Empty):
            while True:
                kept.append(self._inbox.get_nowait())
        for news in kept:
            if news.kind in ("failed", "stopping", "cut off"):
                self._inbox.put(news)

    def wait(self) -> None:
        """Leave the round that is over, and wait for the next one."""
        with self._lock:
            self._agents, self._hosts, self._active = (), (), frozenset()
        self._show(_WAITING)

    def tell(self, news: News) -> None:
        self._queued += 1
        self._outbox.put((self._round, news))
        self._wake.set()

    def news(self) -> News | None:
        self._check_line()
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    @property
    def over(self) -> bool:
        """Whether the run has ended well."""
        return self._over

    def newcomer(self) -> bool:
        now = time.monotonic()
        with self._lock:
            return any(
                seen.status == _WAITING and seen.moves and now - seen.changed < _FRESH_S
                for agent, seen in self._seen.items()
                if agent not in self._agents
            )

    @property
    def has_looked(self) -> bool:
        """Whether the heartbeats of all agents were read at least once."""
        return self._has_looked

    def alive(self) -> set[int]:
        """The agents with a recent heartbeat that did not leave, including this one."""
        now = time.monotonic()
        with self._lock:
            there = {
                agent
                for agent, seen in self._seen.items()
                if seen.status not in (_GONE, _LEFT) and now - seen.changed <= self._lost_after_s
            }
        return there | {self._agent}

    def flush(self, timeout_s: float) -> None:
        """Wait until all messages are sent."""
        deadline = time.monotonic() + timeout_s
        while self._sent < self._queued and not self._stuck() and time.monotonic() < deadline:
            time.sleep(0.01)

    def leave(self, ok: bool, is_stopped: Callable[[], bool] = lambda: False) -> News | None:
        """See Peers.leave. The node that runs the store leaves last, if the others are about to leave."""
        if self._closed.is_set():
            return None
        if ok:
            self._show(_DONE)
            news = self._wait_for_done(is_stopped)
            if news is not None:
                self._show(_IN)
                return news
        self.flush(_LEAVE_S)  # the reason is sent before the heartbeat says that this node left
        self._show(_GONE if ok else _LEFT)
        deadline = time.monotonic() + _LEAVE_S
        while not self._stuck() and time.monotonic() < deadline:
            if self._shown() and not (self._keeps_store and self.alive() - {self._agent}):
                break
            time.sleep(0.02)
        self.close()
        self._thread.join(1.0)
        return None

    def close(self) -> None:
        """Close the connection; a thread that waits in it ends."""
        self._closed.set()
        self._wake.set()
        self._store.cut()

    def _wait_for_done(self, is_stopped: Callable[[], bool]) -> News | None:
        while not self._all_done() and not is_stopped():
            news = self.news()
            if news is not None and news.kind == "cut off" and self._all_done():
                return None
            if news is not None and news.kind not in ("stopping", "done"):
                return news
            time.sleep(0.02)
        return None

    def _all_done(self) -> bool:
        with self._lock:
            others = self._active - {self._agent}
            return all(agent in self._seen and self._seen[agent].status in (_DONE, _GONE) for agent in others)

    def _show(self, status: str) -> None:
        with self._lock:
            self._status = status
            self._beats += 1
        self._wake.set()

    def _shown(self) -> bool:
        return self._shown_status == self._status

    def _stuck(self) -> bool:
        self._check_line()
        return self.is_cut

    def _check_line(self) -> None:
        """Report that the thread gets no answers. Counts short intervals, so that no suspended agent is cut off."""
        now = time.monotonic()
        step, self._looked_at = min(now - self._looked_at, 1.0), now
        self._silent_s = 0.0 if self._steps != self._steps_before else self._silent_s + step
        self._steps_before = self._steps
        if self.is_cut or not (self._broken or self._silent_s > self._cut_off_after_s):
            return
        self.is_cut = True
        why = self._broken or f"no answer for {self._silent_s:.0f} s"
        self._inbox.put(News(-1, "", "cut off", f"this node lost its connection to the rendezvous store ({why})"))

    def _talk(self) -> None:
        beat_at = look_at = 0.0
        try:
            while not self._closed.is_set():
                now = time.monotonic()
                if now >= beat_at or not self._shown():
                    beat_at = now + _BEAT_S
                    self._beat()
                self._send()
                self._hear()
                if now >= look_at:
                    look_at = now + _BEAT_S
                    self._look()
                    self._judge()
                self._steps += 1
                self._wake.wait(_TICK_S)
                self._wake.clear()
        except RuntimeError as error:  # the connection is lost
            self._broken = str(error).partition("\n")[0]

    def _beat(self) -> None:
        with self._lock:
            self._beats += 1
            status, beat = self._status, f"{self._beats} {self._status}"
        self._store.set(f"beat/{self._agent}", beat)
        if status == _GONE:
            self._store.set("over", "")
        self._shown_status = status

    def _send(self) -> None:
        """Append messages to the list in the store, in one request each: a node that is killed leaves no gap."""
        while not self._outbox.empty():
            of_round, news = self._outbox.get()
            entry = json.dumps({"agent": self._agent, "round": of_round, "news": asdict(news)}).encode()
            while self._store.compare_set(f"news/{self._heard + 1}", "", entry) != entry:
                self._hear()
            self._sent += 1

    def _hear(self) -> None:
        while (text := self._store.read([f"news/{self._heard + 1}"])[0]) is not None:
            entry = json.loads(text)
            self._heard += 1
            if entry["agent"] != self._agent:
                with self._lock:
                    self._sort(entry["round"], News(**entry["news"]))

    def _sort(self, of_round: int, news: News) -> None:
        """Whether a message is for this node: the end of the run is for all nodes, that of a round for its nodes."""
        if news.kind in ("failed", "stopping"):
            self._inbox.put(news)
        elif of_round > self._round:
            self._early.append((of_round, news))
        elif of_round == self._round and self._agents:
            self._reported.add("regroup")
            self._inbox.put(news)

    def _look(self) -> None:
        """Read the heartbeats of all agents that connected and have not left."""
        arrived = range(1, self._store.add(ARRIVED, 0) + 1)
        with self._lock:
            gone = {agent for agent, seen in self._seen.items() if seen.status in (_GONE, _LEFT)}
        others = [agent for agent in arrived if agent != self._agent and agent not in gone]
        beats = self._store.read([f"beat/{agent}" for agent in others])
        now = time.monotonic()
        with self._lock:
            for agent, beat in zip(others, beats, strict=True):
                before = self._seen.get(agent)
                if beat is not None and (before is None or before.beat != beat):
                    since = before.since if before else now
                    self._seen[agent] = _Seen(beat, beat.decode().split()[1], since, now)
        self._over = self._over or self._store.check(["over"])
        self._has_looked = True

    def _judge(self) -> None:
        """Report once each node of this round that was lost. One that was cut off or killed sends nothing itself."""
        newest = self._store.add(ROUND, 0)
        self._hear()  # a node sends the reason before it leaves, and before it opens the next round
        now = time.monotonic()
        with self._lock:
            for rank, agent in enumerate(self._agents):
                seen = self._seen.get(agent)
                if agent == self._agent or seen is None or seen.status in (_DONE, _GONE):
                    continue
                silent_s = now - seen.changed
                if seen.status == _LEFT:
                    self._report(agent, News(rank, self._hosts[rank], "lost", "it left the run"))
                elif silent_s > self._lost_after_s:
                    self._report(agent, News(rank, self._hosts[rank], "lost", f"no heartbeat for {silent_s:.0f} s"))
            if self._agents and newest > self._round:
                self._report(
                    "regroup", News(-1, "", "regroup", "other nodes began another rendezvous", cause="regroup")
                )
            if self._agents and self._agent not in self._active and self._all_done():
                self._report("done", News(-1, "", "done", "the nodes that run ranks have ended well"))

    def _report(self, what: object, news: News) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._inbox.put(news)
