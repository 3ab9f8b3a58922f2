"""Several nodes become one world through torch elastic's rendezvous: the only file of the launchers that needs torch.

The ranks do not use the rendezvous' store: they meet on a fresh port of node 0, because ranks of a later attempt that
share one store read the addresses of dead ones.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from distributed.core.errors import LaunchError, Problem
from distributed.launch.peers import NodeTalk
from distributed.launch.ports import free_port
from distributed.launch.request import LaunchRequest, NodePlace

_RUN_ID = "distributed"
_ARRIVED = "distributed/arrived"
_STORE_TIMEOUT_S = 10.0  # of one operation, once all have met
_CARD_TIMEOUT_S = 60.0  # for a node that was counted to say who it is


@dataclass(frozen=True)
class NodeCard:
    """What a node says of itself when the nodes meet."""

    host: str
    address: str
    wanted_rank: int | None
    ranks: int
    run_dir: str
    attempt: int
    port: int


@dataclass(frozen=True)
class Meeting:
    """The nodes have met: this one's place, what they agreed, and the line to the others."""

    place: NodePlace
    hosts: tuple[str, ...]
    run_dir: str
    attempt: int
    peers: NodeTalk


def meet(request: LaunchRequest, *, run_dir_given: bool = False, timeout_s: float = 600.0) -> Meeting:
    """Wait for all nodes, agree on who is which, where the ranks meet and where the run writes.

    A node's own number is honoured when it has one; the others are numbered as they come. Node 0's run directory is
    that of all, except where a node was given its own.
    """
    # Its warnings are about what is reported here as an error.
    logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.ERROR)
    address = _route_address(*request.meeting_point)
    store, keeps_store = _open_store(request, address, timeout_s)
    handler, info = _join(request, store, address, timeout_s)
    card = NodeCard(
        host=socket.gethostname(),
        address=address,
        wanted_rank=request.node_rank,
        ranks=request.ranks_per_node,
        run_dir=request.run_dir,
        attempt=request.attempt,
        port=free_port(),
    )
    cards = _exchange(card, info, request.num_nodes)
    handler.shutdown()  # all are here: whoever comes later is told so
    order, problems = seat(cards)
    node_rank = info.rank if problems else order.index(info.rank)
    hosts = tuple(cards[number].host for number in order)
    store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
    peers = NodeTalk(dist.PrefixStore("distributed/talk", store), node_rank, hosts, keeps_store=keeps_store)
    if problems:
        peers.leave(ok=False)
        raise LaunchError(problems)
    first = cards[order[0]]
    return Meeting(
        place=NodePlace(
            node_rank=node_rank,
            num_nodes=request.num_nodes,
            rank_offset=node_rank * request.ranks_per_node,
            world_size=request.num_nodes * request.ranks_per_node,
            master_addr=first.address,
            master_port=first.port,
        ),
        hosts=hosts,
        run_dir=request.run_dir if run_dir_given else first.run_dir,
        attempt=max(card.attempt for card in cards),
        peers=peers,
    )


def seat(cards: Sequence[NodeCard]) -> tuple[list[int], list[Problem]]:
    """Who is which node: for each node rank its seat at the meeting, and what speaks against it. Alike on all nodes."""
    problems = []
    asked: dict[int, list[int]] = {}
    for number, card in enumerate(cards):
        if card.wanted_rank is not None:
            asked.setdefault(card.wanted_rank, []).append(number)
    for rank, seats in asked.items():
        if len(seats) > 1:
            problems.append(
                Problem(
                    f"{len(seats)} nodes have node_rank={rank}: {', '.join(cards[number].host for number in seats)}",
                    do="give each node its own, or leave node_rank out on all",
                )
            )
    if len({card.ranks for card in cards}) > 1:
        counts = ", ".join(f"{card.host} {card.ranks}" for card in cards)
        problems.append(
            Problem(
                f"the nodes run different numbers of ranks: {counts}",
                why="each node runs the same number",
                do="set the same gpus_per_node on all nodes",
            )
        )
    taken = {seats[0] for seats in asked.values()}
    free = iter(number for number in range(len(cards)) if number not in taken)
    order = [asked[rank][0] if rank in asked else next(free, -1) for rank in range(len(cards))]
    return order, problems


def _open_store(request: LaunchRequest, address: str, timeout_s: float) -> tuple[dist.Store, bool]:
    """The store behind the rendezvous, and whether it lives in this process.

    By number, node 0 keeps it: its machine may know itself under other names than the one in master_addr. Without
    numbers, whoever is first on the machine that has the address does.
    """
    host, port = request.meeting_point
    if request.node_rank is not None:
        attempts = [request.node_rank == 0]
    else:
        attempts = [True, False] if address == _resolve(host, port)[4][0] else [False]
    whole_s = _whole_seconds(timeout_s)
    for keeps_store in attempts:
        parameters = RendezvousParameters(
            "c10d", _endpoint(host, port), _RUN_ID, 1, 1, read_timeout=whole_s, is_host=keeps_store
        )
        try:
            return create_backend(parameters)[1], keeps_store
        except RendezvousConnectionError as error:
            failure = error
    raise LaunchError(
        f"no node of this run answers at {host}:{port} (waited up to {whole_s} s)",
        why=str(failure.__cause__ or failure).partition("\n")[0],
        do="start the node with that address too, check the port and the firewall, and that nothing else uses it",
    ) from failure


def _join(
    request: LaunchRequest, store: dist.Store, address: str, timeout_s: float
) -> tuple[RendezvousHandler, RendezvousInfo]:
    """Be counted, and wait until all have been."""
    host, port = request.meeting_point
    whole_s = _whole_seconds(timeout_s)
    parameters = RendezvousParameters(
        "c10d",
        _endpoint(host, port),
        _RUN_ID,
        request.num_nodes,
        request.num_nodes,
        local_addr=address,
        join_timeout=whole_s,
    )
    store.add(_ARRIVED, 1)
    try:
        with _own_stores_for_ranks():
            handler = create_handler(store, C10dRendezvousBackend(store, _RUN_ID), parameters)
            info = handler.next_rendezvous()
    except RendezvousTimeoutError as error:
        arrived = store.add(_ARRIVED, -1) + 1
        raise LaunchError(
            f"only {arrived} of {request.num_nodes} nodes came to {host}:{port} within {whole_s} s",
            do=f"start the same command on all nodes, with master_addr={host} master_port={port}",
        ) from error
    except RendezvousClosedError as error:
        raise LaunchError(
            f"the run at {host}:{port} has its {request.num_nodes} nodes already",
            do="check num_nodes, or choose another master_port for another run",
        ) from error
    except BaseException:
        with suppress(RuntimeError):
            store.add(_ARRIVED, -1)
        raise
    return handler, info


def _exchange(card: NodeCard, info: RendezvousInfo, num_nodes: int) -> list[NodeCard]:
    table = dist.PrefixStore("distributed/seats", info.store)
    table.set(str(info.rank), json.dumps(asdict(card)))
    table.set_timeout(timedelta(seconds=_CARD_TIMEOUT_S))
    try:
        return [NodeCard(**json.loads(table.get(str(number)))) for number in range(num_nodes)]
    except RuntimeError as error:
        raise LaunchError("a node went away while the nodes were meeting", why=str(error).partition("\n")[0]) from error


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
            del os.environ[name]


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _whole_seconds(timeout_s: float) -> int:
    return max(1, math.ceil(timeout_s))


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
