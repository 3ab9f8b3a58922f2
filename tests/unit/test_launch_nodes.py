"""Nodes agree on their places, and hear of each other's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed.core.env import StoreDoor
from distributed.core.errors import LaunchError
from distributed.core.protocol.store_client import StoreClient
from distributed.core.protocol.store_wire import StoreLostError
from distributed.launch.ports import free_port
from distributed.launch.rendezvous.elastic import StoreEndpoint, elastic_nodes
from distributed.launch.rendezvous.membership import Membership
from distributed.launch.rendezvous.node_channel import ARRIVED, ROUND, NodeChannel
from distributed.launch.rendezvous.nodes import News
from distributed.launch.rendezvous.seating import NodeOffer, RoundRecord, arrange, seat
from distributed.launch.rendezvous.store_server import LocalStore
from distributed.launch.request import LaunchRequest

REQUEST = LaunchRequest(("x.py",), "r", 1, num_nodes=2, master_addr="127.0.0.1", join_token="a token of many letters")
CARD = NodeOffer("h", "127.0.0.1", None, 2, "runs/1", 0, 4000)


def cards(*wanted: int | None) -> list[NodeOffer]:
    return [replace(CARD, host=f"h{seat_number}", wanted_rank=rank) for seat_number, rank in enumerate(wanted)]


@pytest.mark.parametrize(
    ("wanted", "order"),
    [
        ((None, None), [0, 1]),
        ((1, 0), [1, 0]),
        ((None, 0, None), [1, 0, 2]),
        ((2, None, 0), [2, 1, 0]),
        ((5, 0, None), [1, 0, 2]),
    ],
)
def test_given_node_ranks_are_kept_and_the_rest_assigned(wanted, order):
    assert seat(cards(*wanted)) == (order, [])


def test_duplicate_node_rank_and_unequal_nodes_reported_together():
    wrong = [*cards(0, 0), replace(CARD, ranks=4)]
    _, problems = seat(wrong)
    assert len(problems) == 2
    assert "h0, h1" in problems[0].what


def wait_for(look: Callable[[], Any]) -> Any:
    for _ in range(200):
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("did not come in 10 s")


@pytest.fixture
def connect():
    store = LocalStore()
    yield lambda: StoreClient(store.door.address, store.door.secret)
    store.close()


def talk(connect: Callable[[], Any], hosts: list[str], **options: Any) -> list[NodeChannel]:
    store = connect()
    agents = [store.add(ARRIVED, 1) for _ in hosts]
    talks = [NodeChannel(connect(), agent, keeps_store=agent == 1, **options) for agent in agents]
    store.add(ROUND, 1)
    for each in talks:
        each.enter(1, agents, hosts, agents)
    return talks


def test_failure_news_reaches_the_other_node_not_its_sender(connect):
    talks = talk(connect, ["a", "b"])
    talks[0].tell(News(0, "a", "failed", "boom", rank=1))
    heard = wait_for(talks[1].news)
    assert (heard.host, heard.message, heard.rank) == ("a", "boom", 1)
    assert talks[0].news() is None
    for each in reversed(talks):
        each.leave(ok=False)


def test_finished_node_waits_and_learns_of_a_late_failure(connect):
    talks = talk(connect, ["a", "b"])
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(talks[0].leave, True)
        time.sleep(1.0)
        assert not left.done()
        talks[1].tell(News(1, "b", "failed", "late"))
        talks[1].leave(ok=False)
        assert left.result(timeout=10).message == "late"
    talks[0].leave(ok=False)


def test_nodes_that_succeed_leave_together(connect):
    talks = talk(connect, ["a", "b"])
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda each: each.leave(True), talks)) == [None, None]


def test_silent_node_is_reported_lost(connect):
    talks = talk(connect, ["a", "b"], lost_after_s=0.5)
    talks[1].close()
    lost = wait_for(talks[0].news)
    assert (lost.kind, lost.node_rank, lost.host) == ("lost", 1, "b")
    talks[0].leave(ok=False)


class HangingStore:
    """A store behind a link that can be cut: every operation then hangs."""

    def __init__(self, store: StoreClient) -> None:
        self._store, self.linked = store, threading.Event()
        self.linked.set()

    def __getattr__(self, name: str) -> Any:
        self.linked.wait()
        return getattr(self._store, name)


def test_node_with_hanging_store_is_reported_cut_off(connect):
    store = HangingStore(connect())
    talks = talk(lambda: store, ["a"], cut_off_after_s=0.5)
    time.sleep(1.0)
    assert talks[0].news() is None
    store.linked.clear()
    assert wait_for(talks[0].news).kind == "cut off"
    store.linked.set()
    talks[0].leave(ok=False)


class KilledStore:
    """The store of a node that is killed after some more requests; None: it lives."""

    def __init__(self, store: StoreClient) -> None:
        self._store, self.left = store, None
        self.cut = store.cut

    def __getattr__(self, name: str) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("killed")
        return getattr(self._store, name)


def test_node_killed_while_sending_does_not_block_others(connect):
    talks = talk(connect, ["a", "b"])
    for requests in range(8):
        store = KilledStore(connect())
        killed = NodeChannel(store, connect().add(ARRIVED, 1))
        wait_for(lambda killed=killed: killed.has_looked)
        store.left = requests
        killed.tell(News(2, "c", "regroup", "never heard"))
        assert wait_for(killed.news).kind == "cut off"
        killed.close()
    talks[0].tell(News(0, "a", "failed", "boom"))
    assert wait_for(talks[1].news).message == "boom"
    for each in reversed(talks):
        each.leave(ok=False)


def test_regrouped_nodes_keep_order_and_a_legal_world_size():
    before = RoundRecord(agents=(7, 3, 5), hosts=("a", "b", "c"), ranks=(2, 2, 2), attempt=4, restarts=1)
    again = [replace(CARD, agent=agent, attempt=attempt) for agent, attempt in ((9, 1), (5, 0), (7, 2))]
    record = arrange(again, before)
    assert (record.agents, record.ranks, record.attempt) == ((7, 5, 9), (2, 2, 2), 5)
    assert (record.restarts, arrange(again, None).restarts) == (2, 0)
    record = arrange([replace(card, sizes=(1, 2, 3, 8)) for card in again], before)
    assert record.ranks == (2, 1, 0)
    standby = record.place(9)
    assert (standby.ranks, standby.node_rank, standby.num_nodes, standby.world_size) == (0, 2, 2, 3)
    assert record.place(5).rank_offset == 2
    assert arrange([replace(CARD, sizes=(4, 8))], None).problems


def test_incomplete_rendezvous_error_counts_the_nodes():
    request = replace(REQUEST, master_port=free_port())
    with pytest.raises(LaunchError, match="only 1 of 2 nodes"):
        elastic_nodes(request, timeout_s=1).gather(0)


class StallingEndpoint(StoreEndpoint):
    """Its first connection stalls until it is told to go on."""

    def __init__(self, request: LaunchRequest, cache: Path) -> None:
        super().__init__(request, run_dir=None, cache=cache)
        self.goes_on = threading.Event()
        self.stalled: list[Any] = []  # the connections of the thread that stalled
        self._staller = 0

    def connect(self, *, may_keep_store: bool) -> Any:
        self._staller = self._staller or threading.get_ident()
        if threading.get_ident() != self._staller:
            return super().connect(may_keep_store=may_keep_store)
        self.goes_on.wait()
        self.stalled.append(super().connect(may_keep_store=False))
        return self.stalled[-1]


def is_cut(store: StoreClient) -> bool:
    try:
        return not store.check([])
    except StoreLostError:
        return True


def test_late_connection_is_closed_and_does_not_join(tmp_path):
    request = replace(REQUEST, node_rank=0, min_nodes=1, max_nodes=3, master_port=free_port())
    endpoint = StallingEndpoint(request, tmp_path)
    node = Membership(request, endpoint, first_call_s=0.1, last_call_s=0.1, try_s=0.5)
    deadline = time.monotonic() + 30
    assert node.gather(0, is_stopped=lambda: time.monotonic() > deadline).attempt == 0
    endpoint.goes_on.set()
    wait_for(lambda: len(endpoint.stalled) == 2)
    wait_for(lambda: all(map(is_cut, endpoint.stalled)))
    assert node.gather(1, is_stopped=lambda: time.monotonic() > deadline).attempt == 1
    node.leave(ok=False)
    node.close()


class CuttableEndpoint:
    """The connections of one node to a store that no node keeps."""

    address, has_given_token = "127.0.0.1", True

    def __init__(self, connect: Callable[[], StoreClient]) -> None:
        self._connect = connect
        self._made: list[StoreClient] = []

    def connect(self, *, may_keep_store: bool) -> StoreClient:
        self._made.append(self._connect())
        return self._made[-1]

    def keeps_store(self) -> bool:
        return False

    def door(self) -> StoreDoor:
        raise NotImplementedError

    def close(self) -> None:
        for store in self._made:
            store.cut()


def test_first_node_of_a_round_is_the_first_that_is_left(connect):
    endpoints = [CuttableEndpoint(connect) for _ in range(3)]
    request = replace(REQUEST, num_nodes=3)
    nodes = [
        Membership(replace(request, node_rank=rank), endpoint, lost_after_s=0.5)
        for rank, endpoint in enumerate(endpoints)
    ]
    assert not any(node.is_first() for node in nodes), "there was no round yet"
    with ThreadPoolExecutor(3) as pool:
        rounds = list(pool.map(lambda node: node.gather(0), nodes))
    assert [round_.place.node_rank for round_ in rounds] == [0, 1, 2]
    assert [node.is_first() for node in nodes] == [True, False, False]
    nodes[0].close()
    assert wait_for(nodes[0].news).kind == "cut off"
    assert wait_for(nodes[1].news).node_rank == wait_for(nodes[2].news).node_rank == 0
    assert [node.is_first() for node in nodes] == [False, True, False]
    nodes[1].leave(ok=False)
    wait_for(nodes[2].is_first)
    nodes[2].leave(ok=False)


def test_unreachable_rendezvous_error_names_its_address():
    request = replace(REQUEST, node_rank=1, master_port=free_port())
    with pytest.raises(LaunchError, match=f"127.0.0.1:{request.master_port}"):
        elastic_nodes(request, timeout_s=1).gather(0)
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid"):
        elastic_nodes(replace(request, master_addr="no-such-host.invalid"), timeout_s=1).gather(0)
