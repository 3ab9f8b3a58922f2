"""Several nodes become one world: the meeting point is a store in the launcher of one of them, behind the join token.

A node that does not reach it forms no world. The ranks of all nodes meet at the same store, each world under a name of
its own, because ranks that share one with an earlier world would read the addresses of dead ones.
"""

from __future__ import annotations

import atexit
import ipaddress
import socket
from pathlib import Path
from typing import Any

from distributed.core.env import JOIN_TOKEN, StoreDoor, inherited_environ, user_cache
from distributed.core.errors import LaunchError
from distributed.core.store_client import StoreClient
from distributed.core.store_wire import StoreRefusedError
from distributed.launch.join_token import find_tokens, leave_token, new_join_token, remove_token, token_files
from distributed.launch.membership import Membership
from distributed.launch.nodes import Nodes
from distributed.launch.peers import KeyValueStore
from distributed.launch.request import LaunchRequest
from distributed.launch.store_server import StoreServer

_CONNECT_S = 3.0
_STORE_TIMEOUT_S = 10.0  # of one operation
_BACKLOG = 1024


def elastic_nodes(request: LaunchRequest, *, run_dir_given: bool = False, **options: Any) -> Nodes:
    """The nodes that meet at the request's meeting point; the options are those of Membership."""
    point = StoreMeetingPoint(
        request, run_dir=request.run_dir if run_dir_given else None, cache=user_cache(inherited_environ())
    )
    return Membership(request, point, run_dir_given=run_dir_given, **options)


class StoreMeetingPoint:
    """A store in one of the agents. `run_dir` and `cache` are where a token is left that nobody gave."""

    def __init__(self, request: LaunchRequest, *, run_dir: str | None, cache: Path) -> None:
        self._request = request
        self._host, self._port = request.meeting_point
        self.address = _route_address(self._host, self._port)
        self._server: StoreServer | None = None
        self._token = request.join_token  # "": none was given, or made here
        self._files = token_files(self._host, self._port, run_dir, cache)
        self._door: StoreDoor | None = None

    @property
    def has_given_token(self) -> bool:
        """Whether the token is the user's, so that one which is refused stays wrong."""
        return bool(self._request.join_token)

    def keeps_store(self) -> bool:
        return self._server is not None

    def door(self) -> StoreDoor:
        assert self._door is not None, "ranks are started once the nodes have met"
        return self._door

    def connect(self, *, may_keep_store: bool) -> KeyValueStore:
        if may_keep_store and self._server is None and self._is_here():
            self._server = self._serve()
        address, refused = f"tcp:{self._host}:{self._port}", None
        for token in [self._token] if self._token else find_tokens(self._files):
            try:
                store = StoreClient(address, token, prefix="nodes/", timeout_s=_STORE_TIMEOUT_S, connect_s=_CONNECT_S)
            except StoreRefusedError as error:
                refused = error
                continue
            self._door = StoreDoor(address, token)
            return store
        if refused is None:
            refused = StoreRefusedError("this node has no join token: none was given, and none was left in a file")
            socket.create_connection((self._host, self._port), _CONNECT_S).close()  # or else nobody is there yet
        refused.do = _how_to_join(self._files)
        raise refused

    def close(self) -> None:
        """The store itself ends with this process: other nodes may still be leaving."""
        if self._server is not None and not self.has_given_token:
            remove_token(self._token, self._files)

    def _is_here(self) -> bool:
        """By number, node 0 keeps the store: its machine may know itself under other names than that in master_addr.

        Without numbers, whoever is first on the machine that has the address.
        """
        if self._request.node_rank is not None:
            return self._request.node_rank == 0
        return bool(self.address == _resolve(self._host, self._port)[4][0])

    def _serve(self) -> StoreServer | None:
        try:
            listener = _listen(self._host, self._port)
        except OSError as error:
            if self._request.node_rank is None:
                return None  # another agent of this machine was first
            raise LaunchError(
                f"node 0 cannot keep the meeting point {self._host}:{self._port}",
                why=str(error),
                do="check that the address is this machine's, or choose another master_port",
            ) from error
        if not self._token:
            self._token = new_join_token()
            if not leave_token(self._token, self._files):
                listener.close()
                raise LaunchError(
                    "the run's join token could not be left for the other nodes",
                    why=f"none of these files can be written: {', '.join(map(str, self._files))}",
                    do=f'export {JOIN_TOKEN}="$(openssl rand -hex 32)", the same on all nodes',
                )
            atexit.register(self.close)
        return StoreServer(listener, self._token)


def _how_to_join(files: list[Path]) -> str:
    return (
        f"give all nodes the same one in the environment, {JOIN_TOKEN}, or by --join-token @file; without it, node 0"
        f" leaves one in {' and '.join(map(str, files))}, which must be on a disk that the nodes share"
    )


def _listen(host: str, port: int) -> socket.socket:
    """On all addresses, since other nodes may know this one by another than it does; a meeting point on the loopback
    is for this machine alone."""
    family, _, _, _, target = _resolve(host, port)
    if _is_loopback(host):
        return socket.create_server(target[:2], family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _is_loopback(host: str) -> bool:
    """By its name: many machines know themselves as 127.0.1.1, and others know them as something else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
