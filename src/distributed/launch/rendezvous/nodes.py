"""The nodes of a run as its supervisor sees them: they meet, again and again, and tell each other what happened.

One agent, the launching process, stands for each node. `Alone` is the run on one node; several are in `elastic`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from distributed.core.env import StoreDoor
from distributed.core.errors import LaunchError
from distributed.launch.ports import free_port
from distributed.launch.request import LaunchRequest, NodePlace
from distributed.launch.store_server import LocalStore


@dataclass(frozen=True)
class News:
    """Something that concerns all nodes.

    Kinds that a node tells: "failed" (the run is given up: everyone ends), "stopping" (with the signal) and "regroup"
    (this round is over, all meet again). Kinds that are found out here: "lost" (a node is not heard of any more) and
    "cut off" (this node does not reach the meeting point any more). In RunOver also "done": the others ended well.
    """

    node_rank: int  # -1: not known
    host: str
    kind: str
    message: str = ""
    rank: int = -1  # -1: the node itself
    log_path: str = ""
    exit_code: int = 1
    signal: int = 0
    cause: str = ""  # of a regroup: what kind of thing ended the round


@dataclass(frozen=True)
class Round:
    """One meeting: who is in the world now. `hosts` names those that stand by too, after those that run ranks."""

    attempt: int  # strictly increasing over all nodes of a run
    restarts: int  # worlds of this run before this one, since it was launched
    place: NodePlace
    hosts: tuple[str, ...]
    run_dir: str


class RunOver(LaunchError):
    """The run ended while this node waited to take part in it."""

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
    """Whoever waited for the other nodes was asked to stop."""


class Peers(Protocol):
    """The other nodes of a run."""

    def tell(self, news: News) -> None:
        """Say it to all; returns at once."""

    def news(self) -> News | None:
        """The next thing that another node said, or that became of it; never waits."""

    def leave(self, ok: bool, is_stopped: Callable[[], bool] = lambda: False) -> News | None:
        """This node has ended. Waits no longer once `is_stopped`.

        If well, waits for the others, and returns the news if one of them did not after all: after "regroup" and
        "lost" this node may gather again, as if it had not left.
        """


class Nodes(Peers, Protocol):
    """All nodes of a run, able to meet again after something happened to one of them."""

    def gather(
        self,
        attempt: int,
        sizes: Sequence[int] = (),
        ranks: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Round:
        """Meet the others; blocks until enough are there.

        All nodes that are still there call it again for every regroup. `attempt` is the lowest number this node can
        accept; the highest over the nodes wins. The world is the largest of the legal `sizes` (none: any) that the
        ranks of the nodes suffice for; nodes beyond it stand by with no ranks. `ranks` are those that this node has to
        offer, if not as many as the request says. Raises RunOver when the run ended meanwhile, LaunchError when the
        nodes do not come together, and StoppedWaiting once `is_stopped` says so.
        """

    def newcomer(self) -> bool:
        """Whether a node waits to join, and may; never waits."""

    def door(self) -> StoreDoor:
        """The store at which the ranks of all nodes find each other."""

    def close(self) -> None:
        """Nothing more is asked of this; what was made for the run alone is removed."""


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
        """The world of this node, with a fresh port; one that the user named is used by the first attempt only.

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
        """Nobody hears it."""

    def news(self) -> News | None:
        return None

    def newcomer(self) -> bool:
        return False

    def door(self) -> StoreDoor:
        self._store = self._store or LocalStore()
        return self._store.door

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def leave(self, ok: bool, is_stopped: Callable[[], bool] = lambda: False) -> News | None:
        return None


def world_size(available: int, sizes: Sequence[int] = ()) -> int:
    """The largest legal world that so many ranks suffice for.

    >>> world_size(7, (1, 2, 4, 8)), world_size(7)
    (4, 7)
    """
    legal = [size for size in sizes if size <= available]
    if sizes and not legal:
        raise LaunchError(
            f"{available} ranks are there, and the smallest world that is allowed has {min(sizes)}",
            do="start more nodes, or allow smaller worlds",
        )
    return max(legal) if legal else available
