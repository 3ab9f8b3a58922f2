"""Membership: one node of several through every rendezvous of a run, also while the store cannot be reached.

A call to the store may hang forever when a link is cut, so it is made in threads that can be abandoned.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from distributed.core.env import StoreDoor
from distributed.core.errors import LaunchError
from distributed.core.protocol.store_wire import StoreRefusedError
from distributed.launch.ports import free_port
from distributed.launch.rendezvous.node_channel import ARRIVED, KeyValueStore, NodeChannel
from distributed.launch.rendezvous.nodes import News, Round, RunOver, StoppedWaiting
from distributed.launch.rendezvous.rounds import Rounds
from distributed.launch.rendezvous.seating import NodeOffer, RoundRecord
from distributed.launch.request import LaunchRequest

_POLL_S = 0.02
_RETRY_S = 0.2
_REFUSED_S = 10.0  # a user's token may be refused this long before it is an error
_FLUSH_S = 1.0  # to send the message that makes the other nodes join the next round
_FULL_S = 10.0  # a run of fixed size has had all of its nodes for this long: one more is a mistake

T = TypeVar("T")


class RendezvousEndpoint(Protocol):
    """The rendezvous endpoint: where the store is, and how to connect to it."""

    address: str  # of this node, as the others reach it

    def connect(self, *, may_keep_store: bool) -> KeyValueStore:
        """A new connection; the first call may start the store in this process. Raises OSError without an answer."""

    def keeps_store(self) -> bool: ...

    @property
    def has_given_token(self) -> bool:
        """Whether the user gave the join token, so that a refused one stays wrong."""

    def door(self) -> StoreDoor:
        """The address of the store and its secret, for the ranks."""

    def close(self) -> None:
        """Remove the files by which other nodes find the store."""


@dataclass
class _Line:
    """Connections to the store: one for the rendezvous, one for messages, since each handles one call at a time."""

    identity: str  # of the store, so that a new one at the same address is noticed
    agent: int
    store: KeyValueStore
    talk: NodeChannel
    abandoned: threading.Event = field(default_factory=threading.Event)

    def drop(self) -> None:
        self.abandoned.set()
        self.talk.close()
        self.store.cut()


class Membership:
    """See Nodes. `timeout_s` limits the first rendezvous, `rejoin_timeout_s` each later one.

    Once `min_nodes` have joined, the first rendezvous waits `first_call_s` for the rest, and later ones `last_call_s`
    for nodes with a recent heartbeat. `try_s` limits one attempt to connect; a longer one hangs half open.
    """

    def __init__(
        self,
        request: LaunchRequest,
        endpoint: RendezvousEndpoint,
        *,
        run_dir_given: bool = False,
        timeout_s: float = 600.0,
        rejoin_timeout_s: float = 300.0,
        lost_after_s: float = 5.0,
        cut_off_after_s: float = 8.0,
        first_call_s: float = 30.0,
        last_call_s: float = 3.0,
        try_s: float = 8.0,
    ) -> None:
        self._request = request
        self._endpoint = endpoint
        self._run_dir = request.run_dir
        self._run_dir_given = run_dir_given
        self._timeout_s = timeout_s
        self._rejoin_timeout_s = rejoin_timeout_s
        self._lost_after_s = lost_after_s
        self._cut_off_after_s = cut_off_after_s
        self._try_s = try_s
        self._rounds = Rounds(request, first_call_s=first_call_s, last_call_s=last_call_s)
        self._line: _Line | None = None
        self._agents: tuple[int, ...] = ()  # of the last round that this node was in
        self._members = 0  # nodes of this node's round; 0: it is in none

    def gather(
        self,
        attempt: int,
        sizes: Sequence[int] = (),
        ranks: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Round:
        limit_s = self._timeout_s if self._line is None else self._rejoin_timeout_s
        deadline = time.monotonic() + limit_s
        self._members = 0
        while True:
            line = self._line
            if line is None or line.talk.is_cut or line.abandoned.is_set():
                if line is not None:  # its threads hang, and must not send for this node when the link recovers
                    line.drop()
                line = self._line = self._connect(line, deadline, limit_s, is_stopped)
            line.talk.flush(_FLUSH_S)
            line.talk.wait()
            card = self._card(line, attempt, sizes, self._request.ranks_per_node if ranks is None else ranks)
            call = _AbandonableCall(partial(self._rounds.join, line.store, line.talk, card, line.abandoned))
            try:
                has_met = self._attend(call, line, deadline, limit_s, is_stopped)
                if has_met:
                    return self._begin(line, *call.result())
            except BaseException:
                line.abandoned.set()
                raise
            line.drop()
            limit_s = self._rejoin_timeout_s
            deadline = time.monotonic() + limit_s

    def tell(self, news: News) -> None:
        if self._line is not None:
            self._line.talk.tell(news)

    def news(self) -> News | None:
        return self._line.talk.news() if self._line is not None else None

    def newcomer(self) -> bool:
        return self._line is not None and 0 < self._members < self._request.most_nodes and self._line.talk.newcomer()

    def is_first(self) -> bool:
        line = self._line
        if line is None or line.talk.is_cut or not line.talk.has_looked or line.agent not in self._agents:
            return False
        return line.talk.alive().isdisjoint(self._agents[: self._agents.index(line.agent)])

    def leave(self, ok: bool, is_stopped: Callable[[], bool] = lambda: False) -> News | None:
        return self._line.talk.leave(ok, is_stopped) if self._line is not None else None

    def door(self) -> StoreDoor:
        return self._endpoint.door()

    def close(self) -> None:
        self._endpoint.close()

    def _card(self, line: _Line, attempt: int, sizes: Sequence[int], ranks: int) -> NodeOffer:
        return NodeOffer(
            host=socket.gethostname(),
            address=self._endpoint.address,
            wanted_rank=self._request.node_rank,
            ranks=ranks,
            run_dir=self._run_dir,
            attempt=attempt,
            port=free_port(),
            agent=line.agent,
            sizes=tuple(sizes),
        )

    def _begin(self, line: _Line, number: int, record: RoundRecord) -> Round:
        if record.problems:
            line.talk.leave(ok=False)
            raise LaunchError(record.problems)
        active = [agent for agent, ranks in zip(record.agents, record.ranks, strict=True) if ranks]
        line.talk.enter(number, record.agents, record.hosts, active)
        self._agents, self._members = record.agents, len(record.agents)
        if not self._run_dir_given:
            self._run_dir = record.run_dir
        return Round(record.attempt, record.restarts, record.place(line.agent), record.hosts, self._run_dir)

    def _attend(
        self,
        call: _AbandonableCall[tuple[int, RoundRecord]],
        line: _Line,
        deadline: float,
        limit_s: float,
        is_stopped: Callable[[], bool],
    ) -> bool:
        """Wait until the rendezvous is complete; False: this node lost its connection meanwhile."""
        host, port = self._request.rendezvous_endpoint
        full_since: float | None = None
        while not call.wait(_POLL_S):
            if is_stopped():
                raise StoppedWaiting
            news = line.talk.news()
            if news is not None and news.kind in ("failed", "stopping"):
                raise RunOver(news)
            if line.talk.over:
                raise RunOver(News(-1, "", "done"))
            if line.talk.is_cut:
                return False
            now = time.monotonic()
            if self._rounds.is_spare:
                deadline = now + limit_s  # other nodes train: the wait may last as long as the run
            full_since = (full_since or now) if self._rounds.is_spare and self._rounds.is_full_for_good else None
            if full_since is not None and now > full_since + _FULL_S:
                line.talk.leave(ok=False)
                raise LaunchError(
                    f"the run at {host}:{port} has its {self._request.num_nodes} nodes already",
                    do="check num_nodes, or choose another master_port for another run",
                )
            if now > deadline:
                here = len(line.talk.alive())
                line.talk.leave(ok=False)
                raise LaunchError(
                    f"only {here} of {self._request.fewest_nodes} nodes joined at {host}:{port} within {limit_s:.0f} s",
                    do=f"start the same command on all nodes, with master_addr={host} master_port={port}",
                )
        return not isinstance(call.error, RuntimeError)  # the connection is lost

    def _connect(self, before: _Line | None, deadline: float, limit_s: float, is_stopped: Callable[[], bool]) -> _Line:
        """A new connection to the rendezvous endpoint, retried until the deadline."""
        host, port = self._request.rendezvous_endpoint
        why = "no answer"
        refused_since: float | None = None
        while True:
            call = _AbandonableCall(partial(self._open, before))
            if not call.wait(self._try_s):
                call.give_up(_Line.drop)
            elif not isinstance(call.error, OSError | RuntimeError):
                line = call.result()
                if before is None or before.identity != line.identity:
                    self._rounds.forget()
                return line
            else:
                why = str(call.error).partition("\n")[0]
            now = time.monotonic()
            is_refused = isinstance(call.error, StoreRefusedError)
            refused_since = (refused_since or now) if is_refused else None
            if is_stopped():
                raise StoppedWaiting
            # A run that has just ended may still listen there, and a token file may not be written yet.
            if refused_since is not None and self._endpoint.has_given_token and now > refused_since + _REFUSED_S:
                break
            if now > deadline:
                break
            time.sleep(_RETRY_S)
        if isinstance(call.error, StoreRefusedError):
            raise LaunchError(f"this node is not let into the run at {host}:{port}", why=why, do=call.error.do)
        if before is None:
            raise LaunchError(
                f"no node of this run answers at {host}:{port} (waited up to {limit_s:.0f} s)",
                why=why,
                do="start the node with that address too, and check the port (ss -ltnp there) and the firewall",
            )
        raise LaunchError(
            f"the node of the rendezvous endpoint {host}:{port} is gone: no answer for {limit_s:.0f} s",
            why=f"the rendezvous store ran in the launcher on that node, and is lost with it ({why})",
            do="start the same command on all nodes again, with resume_from_checkpoint=true and the same run_dir",
        )

    def _open(self, before: _Line | None) -> _Line:
        """Open the connections, in a thread that may be abandoned: it changes nothing of this node."""
        store = self._endpoint.connect(may_keep_store=before is None)
        identity = store.compare_set("identity", "", uuid.uuid4().hex).decode()
        agent = before.agent if before is not None and before.identity == identity else store.add(ARRIVED, 1)
        talk = NodeChannel(
            self._endpoint.connect(may_keep_store=False),
            agent,
            keeps_store=self._endpoint.keeps_store(),
            lost_after_s=self._lost_after_s,
            cut_off_after_s=self._cut_off_after_s,
        )
        return _Line(identity, agent, store, talk)


class _AbandonableCall(Generic[T]):
    """A call in its own thread, which the caller may abandon."""

    def __init__(self, task: Callable[[], T]) -> None:
        self._task = task
        self._results: list[T] = []
        self.error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="node-errand", daemon=True).start()

    def _run(self) -> None:
        try:
            self._results.append(self._task())
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: raised by `result`
            self.error = error
        finally:
            self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def give_up(self, dispose: Callable[[T], None]) -> None:
        """Abandon the call; a result that it still returns is discarded."""

        def await_result() -> None:
            self._ended.wait()
            for result in self._results:
                dispose(result)

        threading.Thread(target=await_result, name="node-errand-end", daemon=True).start()

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self._results[0]
