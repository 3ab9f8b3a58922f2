"""The nodes of a run as its supervisor sees them: a rendezvous for each attempt, and messages in between.

One agent, the launching process, represents each node. `Alone` is a run on one node; several nodes are in `elastic`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Protocol

from distributed.core.choices import NodeNews
from distributed.core.env import StoreDoor
from distributed.core.errors import LaunchError
from distributed.launch.ports import free_port
from distributed.launch.rendezvous.store_server import LocalStore
from distributed.launch.request import LaunchRequest, NodePlace


@dataclass(frozen=True)
class News:
    """A message to all nodes.

    Kinds that a node sends: "failed" (the run is given up: all nodes end), "stopping" (with the signal) and "regroup"
    (this round is over, the next one begins). Kinds that are found here: "lost" (a node has no heartbeat any more) and
    "cut off" (this node lost its connection to the store). In RunOver also "done": the other nodes ended well.
    """

    node_rank: int  # -1: unknown
    host: str
    kind: NodeNews
    message: str = ""
    _: KW_ONLY
    rank: int = -1  # -1: the node itself
    log_path: str = ""
    exit_code: int = 1
    signal: int = 0
    cause: str = ""  # of a regroup: the kind of fault that ended the round


@dataclass(frozen=True)
class Round:
    """The result of one rendezvous. `hosts` lists the nodes that run ranks, then those on standby."""

    attempt: int  # strictly increasing over all nodes of a run
    restarts: int  # worlds of this run before this one, since it was launched
    place: NodePlace
    hosts: tuple[str, ...]
    run_dir: str


class RunOver(LaunchError):
    """The run ended while this node waited to join it."""

    def __init__(self, news: News) -> None:
        who = f"node {news.node_rank} ({news.host})" if news.node_rank >= 0 else "another node"
        ending = {"done": "has ended well", "stopping": f"was stopped by {who}"}.get(
            news.kind, f"was given up by {who}: {news.message}"
        )
        super().__init__(f"the run {ending} while this node waited to join it")
        self.news = news
        codes = {"done": 0, "stopping": 128 + news.signal}
        self.exit_code = codes.get(news.kind, news.exit_code)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.news,)


class StoppedWaiting(Exception):
    """A stop was requested during the wait for the other nodes."""


class Peers(Protocol):
    """The other nodes of a run."""

    def tell(self, news: News) -> None:
        """Send a message to all nodes; returns at once."""

    def news(self) -> News | None:
        """The next message of another node, or on its loss; never waits."""

    def leave(self, ok: bool, is_stopped: Callable[[], bool] = lambda: False) -> News | None:
        """Leave the run. Waits no longer once `is_stopped`.

        If this node ended well, waits for the other nodes, and returns the message if one of them failed after all:
        after "regroup" and "lost" this node may gather again, as if it had not left.
        """


class Nodes(Peers, Protocol):
    """All nodes of a run, with another rendezvous after the loss of one of them."""

    def gather(
        self,
        attempt: int,
        sizes: Sequence[int] = (),
        ranks: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Round:
        """The rendezvous with the other nodes; blocks until enough have joined.

        All remaining nodes call it again for every regroup. `attempt` is the lowest number this node can accept; the
        highest over the nodes is used. The world size is the largest of the legal `sizes` (none: any) that the nodes
        have ranks for; nodes beyond it are on standby without ranks. `ranks` is the number that this node offers, if
        not that of the request. Raises RunOver if the run ended meanwhile, LaunchError if the rendezvous fails, and
        StoppedWaiting once `is_stopped` is true.
        """

    def newcomer(self) -> bool:
        """Whether a node waits to join and may do so; never waits."""

    def is_first(self) -> bool:
        """Whether no node is left that stood before this one in the last round; never waits. False: not known."""

    def door(self) -> StoreDoor:
        """The store through which the ranks of all nodes rendezvous."""

    def close(self) -> None:
        """Remove the files that were made for this run only; no other call follows."""


class Alone:
    """The only node of a run."""

    def __init__(self, request: LaunchRequest) -> None:
        self._request = request
        self._met = 0
        self._store: LocalStore | None = None

    def gather(
        self,
        attempt: int,
        sizes: Sequence[int] = (),
        ranks: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Round:
        """The world of this node, with a free port; a port that the user set is used by the first attempt only.

        >>> Alone(LaunchRequest(("train.py",), "runs/x", ranks_per_node=3)).gather(0, sizes=(1, 2, 4)).place.ranks
        2
        """
        request = replace(self._request, master_port=None) if self._met else self._request
        self._met += 1
        place = NodePlace.alone(request, free_port())
        ranks = world_size(place.ranks if ranks is None else ranks, sizes)
        place = replace(place, ranks=ranks, world_size=ranks, nodes=((place.master_addr, ranks),))
        return Round(attempt, self._met - 1, place, (socket.gethostname(),), self._request.run_dir)

    def tell(self, news: News) -> None:
        """Does nothing: no other node receives the message."""

    def news(self) -> News | None:
        return None

    def newcomer(self) -> bool:
        return False

    def is_first(self) -> bool:
        return True

    def door(self) -> StoreDoor:
        self._store = self._store or LocalStore()
        return self._store.door

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def leave(self, ok: bool, is_stopped: Callable[[], bool] = lambda: False) -> News | None:
        return None


def world_size(available: int, sizes: Sequence[int] = ()) -> int:
    """The largest legal world size for that many ranks.

    >>> world_size(7, (1, 2, 4, 8)), world_size(7)
    (4, 7)
    """
    legal = [size for size in sizes if size <= available]
    if sizes and not legal:
        raise LaunchError(
            f"{available} ranks are available, and the smallest legal world size is {min(sizes)}",
            do="start more nodes, or allow smaller worlds",
        )
    return max(legal) if legal else available
