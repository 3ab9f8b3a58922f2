"""Nodes agree on their places, and hear of each other's end."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from distributed.core.errors import LaunchError
from distributed.launch.elastic import NodeCard, meet, seat
from distributed.launch.peers import News, NodeTalk
from distributed.launch.ports import free_port
from distributed.launch.request import LaunchRequest

CARD = NodeCard("h", "127.0.0.1", None, 2, "runs/1", 0, 4000)


def cards(*wanted: int | None) -> list[NodeCard]:
    return [replace(CARD, host=f"h{seat_number}", wanted_rank=rank) for seat_number, rank in enumerate(wanted)]


@pytest.mark.parametrize(
    ("wanted", "order"),
    [((None, None), [0, 1]), ((1, 0), [1, 0]), ((None, 0, None), [1, 0, 2]), ((2, None, 0), [2, 1, 0])],
)
def test_numbers_are_honoured_and_the_rest_filled_in(wanted, order):
    assert seat(cards(*wanted)) == (order, [])


def test_two_nodes_with_one_number_and_unequal_nodes_are_told_together():
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


def test_a_failure_reaches_the_other_node_and_not_its_own():
    store = dist.HashStore()
    talks = [NodeTalk(store, rank, ["a", "b"], keeps_store=rank == 0) for rank in range(2)]
    talks[0].tell(News(0, "a", "failed", "boom", rank=1))
    heard = wait_for(talks[1].news)
    assert (heard.host, heard.message, heard.rank) == ("a", "boom", 1)
    assert talks[0].news() is None
    for talk in reversed(talks):
        talk.leave(ok=False)


def test_a_node_that_is_done_waits_for_the_others_and_hears_their_late_failure():
    store = dist.HashStore()
    talks = [NodeTalk(store, rank, ["a", "b"]) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(talks[0].leave, True)
        time.sleep(1.0)
        assert not left.done()
        talks[1].tell(News(1, "b", "failed", "late"))
        talks[1].leave(ok=False)
        assert left.result(timeout=10).message == "late"


def test_nodes_that_end_well_leave_together():
    store = dist.HashStore()
    talks = [NodeTalk(store, rank, ["a", "b"], keeps_store=rank == 0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda talk: talk.leave(True), talks)) == [None, None]


def test_a_node_that_falls_silent_is_lost():
    talk = NodeTalk(dist.HashStore(), 0, ["a", "b"], lost_after_s=0.5)
    lost = wait_for(talk.news)
    assert (lost.kind, lost.node_rank, lost.host) == ("failed", 1, "b")
    talk.leave(ok=False)


def test_a_rendezvous_that_is_not_complete_says_how_many_came():
    request = LaunchRequest(("x.py",), "r", 1, num_nodes=2, master_addr="127.0.0.1", master_port=free_port())
    with pytest.raises(LaunchError, match="only 1 of 2 nodes"):
        meet(request, timeout_s=1)


def test_a_meeting_point_where_nobody_is():
    request = LaunchRequest(
        ("x.py",), "r", 1, num_nodes=2, node_rank=1, master_addr="127.0.0.1", master_port=free_port()
    )
    with pytest.raises(LaunchError, match=f"127.0.0.1:{request.master_port}"):
        meet(request, timeout_s=1)
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid"):
        meet(replace(request, master_addr="no-such-host.invalid"), timeout_s=1)
