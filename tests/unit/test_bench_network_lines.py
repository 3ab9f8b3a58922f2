"""Lines of the network benchmark on this machine's loopback: who is let in, what is counted, how a broken one ends."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from distributed.bench.network.lines import Listener, MeasuredLine, dial_lines
from distributed.bench.network.measuring import StreamTurn, answer_all, ask_and_time
from distributed.bench.network.turns import MeasuredNode, NetworkAsked, NetworkTurn, collect, plan_turns
from distributed.core.errors import LaunchError
from distributed.core.protocol.store_wire import HELLO, NONCE_BYTES

SECRET = "the secret of this measurement"
Beside = Callable[..., "Future[Any]"]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener("127.0.0.1", SECRET)) as found:
        yield found


@pytest.fixture
def beside() -> Iterator[Beside]:
    with ThreadPoolExecutor() as pool:
        yield pool.submit


def joined(listener: Listener, beside: Beside, *sends: bool) -> tuple[list[MeasuredLine], list[MeasuredLine]]:
    accepted = beside(listener.accept, 3, len(sends), 30.0)
    dialled = dial_lines("127.0.0.1", listener.port, SECRET, 3, sends=sends, timeout_s=30.0)
    return dialled, accepted.result()


def heard_of(connection: socket.socket) -> bytes:
    """All that comes until the other side hangs up, as it must."""
    heard = b""
    connection.settimeout(30)
    with suppress(ConnectionError):
        while part := connection.recv(64):
            heard += part
    return heard


def test_lines_arrive_in_order_with_their_directions(listener: Listener, beside: Beside) -> None:
    dialled, accepted = joined(listener, beside, True, False, True)
    assert [line.sends for line in dialled] == [True, False, True]
    assert [line.sends for line in accepted] == [False, True, False]
    ports = [line.connection.getsockname()[1] for line in dialled]
    assert [line.connection.getpeername()[1] for line in accepted] == ports


def test_stranger_is_hung_up_on_and_changes_nothing(listener: Listener, beside: Beside) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(b"\0" * 64)
        dialled, accepted = joined(listener, beside, True)
        assert len(accepted) == 1
        assert len(heard_of(stranger)) <= len(HELLO) + NONCE_BYTES, "no more than the challenge"
    assert accepted[0].connection.getpeername() == dialled[0].connection.getsockname()


def test_line_of_another_turn_is_not_taken(listener: Listener, beside: Beside) -> None:
    late = beside(listener.accept, 4, 1, 3.0)
    dial_lines("127.0.0.1", listener.port, SECRET, 3, sends=(True,), timeout_s=30.0)
    with pytest.raises(LaunchError, match="0 of 1 connections came"):
        late.result()


def test_bytes_are_counted_where_they_arrive(listener: Listener, beside: Beside) -> None:
    dialled, accepted = joined(listener, beside, True, True)
    sender = beside(StreamTurn(dialled, 0.3, 0.1).run)
    arrived = StreamTurn(accepted, 0.3, 0.1).run()
    assert arrived is not None
    assert 0 < arrived.low_gbit_s <= arrived.gbit_s <= arrived.high_gbit_s
    assert sender.result() is None, "a side that only sends has nothing to report"


def test_sender_that_ends_too_early_is_an_error(listener: Listener, beside: Beside) -> None:
    dialled, accepted = joined(listener, beside, True)
    counting = beside(StreamTurn(accepted, 60.0, 0.0).run)
    dialled[0].connection.sendall(b"\0" * 1000)
    dialled[0].close()
    with pytest.raises(LaunchError, match="a connection broke while it was measured"):
        counting.result()


def test_round_trips_end_with_the_side_that_asks(listener: Listener, beside: Beside) -> None:
    dialled, accepted = joined(listener, beside, True)
    answering = beside(answer_all, accepted[0])
    trips = ask_and_time(dialled[0], 0.1)
    dialled[0].close()
    answering.result()
    assert trips.trips >= 20
    assert 0 < trips.low_us <= trips.median_us <= trips.p99_us


def test_rdma_is_measured_where_both_nodes_have_it() -> None:
    with_rdma = [MeasuredNode(rank, f"n{rank}", "eth0", "", speed_mbit=1000, rdma="mlx5_0/1") for rank in range(2)]
    nodes = [*with_rdma, MeasuredNode(2, "n2", "eth0", "")]
    turns = [turn for turn in plan_turns(nodes, 4) if turn.kind == "rdma"]
    assert [turn.nodes for turn in turns] == [(0, 1), (1, 0)]
    said = {"arrived": {"gbit_s": 196.5, "low_gbit_s": None, "high_gbit_s": None}}
    results = [{0: {}, 1: said}, {1: {}, 0: {"failed": "Unable to init the socket connection"}}]
    found = collect(nodes, NetworkAsked(), turns, results)
    assert [(row["from"], row["to"], row["gbit_s"]) for row in found.throughput] == [(0, 1, 196.5)]
    assert found.missing == {"ib_write_bw from node 1 to node 0": "Unable to init the socket connection"}


def test_nominal_share_is_of_the_slower_link() -> None:
    nodes = [
        MeasuredNode(rank, f"n{rank}", "eth0", "", speed_mbit=speed) for rank, speed in enumerate((1000, 10_000, 0))
    ]
    arrived = {"arrived": {"gbit_s": 0.5, "low_gbit_s": 0.4, "high_gbit_s": 0.6}}
    turns = [NetworkTurn("stream", 0, 1), NetworkTurn("stream", 1, 2)]
    found = collect(nodes, NetworkAsked(), turns, [{0: {}, 1: arrived}, {1: {}, 2: arrived}])
    assert [row["of_nominal"] for row in found.throughput] == [0.5, None]
