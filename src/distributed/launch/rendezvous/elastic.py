"""Rendezvous of several nodes through a store in the launcher of one of them, protected by the join token.

A node that does not reach the store forms no world. The ranks of all nodes use the same store, with a key prefix for
each world, because keys of an earlier world hold the addresses of dead ranks.
"""

from __future__ import annotations

import atexit
import ipaddress
import socket
from pathlib import Path
from typing import Any

from distributed.core.env import JOIN_TOKEN, StoreDoor, inherited_environ, user_cache
from distributed.core.errors import LaunchError
from distributed.core.protocol.store_client import StoreClient
from distributed.core.protocol.store_wire import StoreRefusedError
from distributed.launch.rendezvous.join_token import find_tokens, leave_token, new_join_token, remove_token, token_files
from distributed.launch.rendezvous.membership import Membership
from distributed.launch.rendezvous.node_channel import KeyValueStore
from distributed.launch.rendezvous.nodes import Nodes
from distributed.launch.rendezvous.store_server import StoreServer
from distributed.launch.request import LaunchRequest

_CONNECT_S = 3.0
_STORE_TIMEOUT_S = 10.0  # of one operation
_BACKLOG = 1024


def elastic_nodes(request: LaunchRequest, *, run_dir_given: bool = False, **options: Any) -> Nodes:
    """Membership of this node in the request's rendezvous; the options are those of Membership."""
    endpoint = StoreEndpoint(
        request, run_dir=request.run_dir if run_dir_given else None, cache=user_cache(inherited_environ())
    )
    return Membership(request, endpoint, run_dir_given=run_dir_given, **options)


class StoreEndpoint:
    """A rendezvous store in one of the agents. A generated join token is written to `run_dir` and `cache`."""

    def __init__(self, request: LaunchRequest, *, run_dir: str | None, cache: Path) -> None:
        self._request = request
        self._host, self._port = request.rendezvous_endpoint
        self.address = _route_address(self._host, self._port)
        self._server: StoreServer | None = None
        self._token = request.join_token  # "": neither given nor generated yet
        self._files = token_files(self._host, self._port, run_dir, cache)
        self._door: StoreDoor | None = None

    @property
    def has_given_token(self) -> bool:
        """Whether the user gave the token, so that a refused one stays wrong."""
        return bool(self._request.join_token)

    def keeps_store(self) -> bool:
        return self._server is not None

    def door(self) -> StoreDoor:
        assert self._door is not None, "ranks are started after the rendezvous of the nodes"
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
            socket.create_connection((self._host, self._port), _CONNECT_S).close()  # fails if no node listens there yet
        refused.do = _how_to_join(self._files)
        raise refused

    def close(self) -> None:
        """Remove the token's files. The store itself ends with this process: other nodes may still be leaving."""
        if self._server is not None and not self.has_given_token:
            remove_token(self._token, self._files)

    def _is_here(self) -> bool:
        """Whether this node runs the store: with node ranks, node 0, which may not resolve master_addr itself.

        Without node ranks it is the first node on the machine that has the address.
        """
        if self._request.node_rank is not None:
            return self._request.node_rank == 0
        return bool(self.address == _resolve(self._host, self._port)[4][0])

    def _serve(self) -> StoreServer | None:
        try:
            listener = _listen(self._host, self._port)
        except OSError as error:
            if self._request.node_rank is None:
                return None  # another agent of this machine runs it already
            raise LaunchError(
                f"node 0 cannot listen on the rendezvous endpoint {self._host}:{self._port}",
                why=str(error),
                do="check that the address is this machine's, or choose another master_port",
            ) from error
        if not self._token:
            self._token = new_join_token()
            if not leave_token(self._token, self._files):
                listener.close()
                raise LaunchError(
                    "the run's join token could not be written for the other nodes",
                    why=f"none of these files can be written: {', '.join(map(str, self._files))}",
                    do=f'export {JOIN_TOKEN}="$(openssl rand -hex 32)", the same on all nodes',
                )
            atexit.register(self.close)
        return StoreServer(listener, self._token)


def _how_to_join(files: list[Path]) -> str:
    return (
        f"give all nodes the same one: {JOIN_TOKEN}=… in the environment, or --join-token @file; without it, node 0"
        f" writes a token to {' and '.join(map(str, files))}, which must be on a disk that the nodes share"
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on all addresses, since other nodes may know this one by another address; an endpoint on the
    loopback interface is for this machine only."""
    family, _, _, _, target = _resolve(host, port)
    if _is_loopback(host):
        return socket.create_server(target[:2], family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine, by name: many machines resolve their own name to 127.0.1.1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve(host: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]


def _route_address(host: str, port: int) -> str:
    """This machine's address on the route to a host; the host's own address if that is this machine."""
    try:
        family, kind, _, _, target = _resolve(host, port)
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: selects the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"master_addr={host} cannot be reached from {socket.gethostname()}",
            why=str(error),
            do="set master_addr to a host name or address that every node knows",
        ) from error
