"""Several nodes become one world through torch elastic's rendezvous: the only file of the launchers that needs torch.

Every round has a rendezvous of its own, so that no dead or cut-off node is left in it from before. The store lives in
the agent at the meeting point: a node that does not reach it forms no world. The ranks do not use that store: they
meet on a fresh port of node 0, because ranks that share one with an earlier attempt read the addresses of dead ones.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from distributed.core.errors import LaunchError
from distributed.launch.membership import Membership
from distributed.launch.nodes import Nodes
from distributed.launch.peers import KeyValueStore
from distributed.launch.request import LaunchRequest
from distributed.launch.rounds import Terms

_CONNECT_S = 3.0
_STORE_TIMEOUT_S = 10.0  # of one operation
_KEEP_ALIVE_S = 1
# Torch compares clocks of different nodes: a short life would drop those whose clocks differ. One that died while it
# waited says nothing when the cards are read, and is left out of the next round.
_KEEP_ALIVE_MISSED = 60
_WEEK = timedelta(days=7)  # how long to wait is decided elsewhere
_POLL_S = 0.03


def elastic_nodes(request: LaunchRequest, **options: Any) -> Nodes:
    """The nodes that meet at the request's meeting point; the options are those of Membership."""
    return Membership(request, TorchMeetingPoint(request), **options)


class TorchMeetingPoint:
    """A TCPStore in one of the agents."""

    def __init__(self, request: LaunchRequest) -> None:
        # Its warnings are about what is reported here as an error.
        logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.ERROR)
        self._request = request
        self._host, self._port = request.meeting_point
        self.address = _route_address(self._host, self._port)
        self._server: dist.TCPStore | None = None

    def keeps_store(self) -> bool:
        return self._server is not None

    def connect(self, *, may_keep_store: bool) -> KeyValueStore:
        if may_keep_store and self._server is None and self._is_here():
            self._server = self._serve()
        # Torch writes a page of stack frames when nobody answers.
        socket.create_connection((self._host, self._port), _CONNECT_S).close()
        store = dist.TCPStore(
            self._host, self._port, is_master=False, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False
        )
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        return cast(KeyValueStore, dist.PrefixStore("distributed", store))

    def _is_here(self) -> bool:
        """By number, node 0 keeps the store: its machine may know itself under other names than that in master_addr.

        Without numbers, whoever is first on the machine that has the address.
        """
        if self._request.node_rank is not None:
            return self._request.node_rank == 0
        return bool(self.address == _resolve(self._host, self._port)[4][0])

    def _serve(self) -> dist.TCPStore | None:
        try:
            return dist.TCPStore(
                self._host,
                self._port,
                is_master=True,
                timeout=timedelta(seconds=_CONNECT_S),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            if self._request.node_rank is None:
                return None  # another agent of this machine was first
            raise LaunchError(
                f"node 0 cannot keep the meeting point {self._host}:{self._port}",
                why=str(error).partition("\n")[0],
                do="check that the address is this machine's, or choose another master_port",
            ) from error

    def rendezvous(
        self, store: KeyValueStore, number: int, terms: Terms, check: Callable[[], None]
    ) -> tuple[int, int] | None:
        """Be counted in a round, and wait until all have been."""
        torch_store = cast(dist.Store, store)
        name = f"round-{number}"
        backend = _PatientBackend(torch_store, name, check)
        handler = DynamicRendezvousHandler.from_backend(
            name,
            torch_store,
            backend,
            terms.fewest,
            terms.most,
            self.address,
            RendezvousTimeout(join=_WEEK, last_call=timedelta(seconds=terms.last_call_s)),
            keep_alive_interval=_KEEP_ALIVE_S,
            keep_alive_max_attempt=_KEEP_ALIVE_MISSED,
        )
        # The handler's heartbeats end with the handler, which is not needed once all have been counted.
        try:
            with _own_stores_for_ranks():
                info = handler.next_rendezvous()
        except (RendezvousError, RuntimeError):  # a node went away in the middle, or the store: the next round shows
            return None
        finally:
            backend.is_joining = False
        return info.rank, info.world_size


class _PatientBackend(C10dRendezvousBackend):
    """Answers when there is something new, instead of being asked once a second, and ends a wait that `check` ends."""

    def __init__(self, store: dist.Store, run_id: str, check: Callable[[], None]) -> None:
        super().__init__(store, run_id)
        self._check = check
        self.is_joining = True

    def get_state(self) -> tuple[bytes, Any] | None:
        if self.is_joining:
            self._check()
        return super().get_state()

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        answer = super().set_state(state, token)
        if answer is None or not answer[2] or not self.is_joining:
            return answer
        written = pickle.loads(state)  # by torch, in this process
        if written.complete or written.closed:
            return answer
        deadline = time.monotonic() + _KEEP_ALIVE_S
        while time.monotonic() < deadline:
            self._check()
            newest = super().get_state()
            if newest is not None and newest[1] != answer[1]:
                return *newest, False
            time.sleep(_POLL_S)
        return answer


@contextmanager
def _own_stores_for_ranks() -> Iterator[None]:
    """Torch's switch against sharing the rendezvous' store with the ranks, while the rendezvous looks at it."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    with_switch = name in os.environ
    if not with_switch:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if not with_switch:
            os.environ.pop(name, None)


def _resolve(host: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]


def _route_address(host: str, port: int) -> str:
    """The address of this machine on the way to a host, under which that network reaches it; the host's own at home."""
    try:
        family, kind, _, _, target = _resolve(host, port)
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of a datagram socket: picks the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"master_addr={host} cannot be reached from {socket.gethostname()}",
            why=str(error),
            do="set master_addr to a host name or address that every node knows",
        ) from error
