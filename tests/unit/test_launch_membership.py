"""Nodes meet again and again: after news, after a death, when others come. The agents are processes of this machine."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from distributed.launch.ports import free_port, port_in_use
from tests.agents import Agent

ELASTIC = {"min_nodes": 1, "max_nodes": 4}


@pytest.fixture
def start():
    port = free_port()
    with ExitStack() as stack:

        def begin(name: str, **options: Any) -> Agent:
            return stack.enter_context(Agent(name, port, run_dir=f"runs/{name}", **options))

        begin.port = port
        yield begin
    assert not port_in_use(port)


def regroup(agent: Agent, *others: Agent) -> None:
    """One node begins, the others hear of it and follow."""
    agent.do("tell", node_rank=0, host=agent.name, kind="regroup", message=f"of {agent.name}", cause="newcomer")
    agent.gather()
    for other in others:
        news = other.until("regroup")
        assert (news["message"], news["cause"]) == (f"of {agent.name}", "newcomer")
        other.gather()


def ranks(*agents: Agent) -> list[tuple[int, int, int]]:
    """For each node: its number, how many ranks it runs, and the size of the world."""
    met = [agent.met() for agent in agents]
    assert len({(said["attempt"], said["place"]["master_port"], said["run_dir"]) for said in met}) == 1
    places = [said["place"] for said in met]
    return [(place["node_rank"], place["ranks"], place["world_size"]) for place in places]


def test_two_nodes_regroup_repeatedly_and_leave_together(start):
    a, b = start("a", node_rank=0), start("b", node_rank=1)
    a.gather(3), b.gather(1)
    assert ranks(a, b) == [(0, 1, 2), (1, 1, 2)]
    for _ in range(5):
        regroup(b, a)
        assert ranks(a, b) == [(0, 1, 2), (1, 1, 2)]
    rounds = [said for said in a.said if "attempt" in said]
    assert [said["attempt"] for said in rounds] == [3, 4, 5, 6, 7, 8]
    assert len({said["place"]["master_port"] for said in rounds}) == 6
    print("a regroup took", sorted(round(said["took_s"], 2) for said in rounds[1:]), "s")
    a.do("leave", ok=True), b.do("leave", ok=True)
    assert [agent.until("left")["left"] for agent in (a, b)] == [None, None]


def test_survivor_of_a_killed_node_continues_and_admits_another(start):
    a, b = start("a", node_rank=0, **ELASTIC), start("b", node_rank=1, **ELASTIC)
    a.gather(), b.gather()
    assert ranks(a, b) == [(0, 1, 2), (1, 1, 2)]
    b.process.kill()
    lost = a.until("lost")
    assert lost["node_rank"] == 1
    a.gather()
    assert ranks(a) == [(0, 1, 1)]
    c = start("c", ranks=2, **ELASTIC).gather()
    a.until("newcomer")
    regroup(a)
    assert ranks(a, c) == [(0, 1, 3), (1, 2, 3)]


def test_too_few_nodes_wait_for_a_replacement(start):
    a, b = start("a", node_rank=0, max_nodes=3), start("b", node_rank=1, max_nodes=3)
    a.gather(), b.gather()
    ranks(a, b)
    b.process.kill()
    a.until("lost")
    a.gather()
    with pytest.raises(AssertionError, match="did not say"):
        a.met(timeout_s=6.0)
    c = start("c", max_nodes=3).gather()
    assert ranks(a, c) == [(0, 1, 2), (1, 1, 2)]


def test_third_node_is_standby_when_three_make_no_legal_world(start):
    a, b = start("a", node_rank=0, **ELASTIC), start("b", node_rank=1, **ELASTIC)
    a.gather(), b.gather()
    ranks(a, b)
    c = start("c", **ELASTIC).gather(0, (1, 2, 4, 8))
    a.until("newcomer"), b.until("newcomer")
    regroup(b, a)
    assert ranks(a, b, c) == [(0, 1, 3), (1, 1, 3), (2, 1, 3)]
    for agent in (c, a, b):
        agent.gather(0, (1, 2, 4, 8))
    assert ranks(a, b, c) == [(0, 1, 2), (1, 1, 2), (2, 0, 2)]
    b.process.kill()
    a.until("lost"), c.until("lost")
    a.gather(0, (1, 2, 4, 8)), c.gather(0, (1, 2, 4, 8))
    assert ranks(a, c) == [(0, 1, 2), (1, 1, 2)]
    a.gather(0, (1, 4, 8)), c.gather(0, (1, 4, 8))
    assert ranks(a, c) == [(0, 1, 1), (1, 0, 1)]
    a.do("leave", ok=True)
    c.until("done")  # it runs no ranks that could tell it
    c.do("leave", ok=True)
    assert [agent.until("left")["left"] for agent in (a, c)] == [None, None]


def test_waiting_node_learns_run_failed_and_full_run_refuses(start):
    a, b = start("a", node_rank=0), start("b", node_rank=1)
    a.gather(), b.gather()
    ranks(a, b)
    refused, spare = start("c").gather(), start("d", max_nodes=4).gather()
    assert "has its 2 nodes already" in refused.until("error")["error"]
    a.do("leave", ok=True)
    b.do("tell", node_rank=1, host="b", kind="failed", message="no good").do("leave", ok=False)
    assert a.until("left")["left"]["message"] == "no good"
    over = spare.until("error")
    assert over["of"] == "RunOver"
    assert "no good" in over["error"]


def test_nodes_rejoin_a_restarted_rendezvous_host_or_time_out(start):
    more = {"num_nodes": 3, "min_nodes": 2}
    a = start("a", node_rank=0, **more)
    b = start("b", node_rank=1, rejoin_timeout_s=120.0, **more)
    c = start("c", node_rank=2, rejoin_timeout_s=1.0, **more)
    for agent in (a, b, c):
        agent.gather()
    assert ranks(a, b, c) == [(0, 1, 3), (1, 1, 3), (2, 1, 3)]
    a.process.kill()
    for agent in (b, c):
        agent.until("cut off")
        agent.gather(7)
    gone = c.until("error")["error"]
    assert "the rendezvous endpoint" in gone
    assert "resume_from_checkpoint=true" in gone
    again = start("again", node_rank=0, **more | {"first_call_s": 0.5}).gather()
    again.met(), b.met()
    assert [agent.said[-1]["attempt"] for agent in (again, b)] == [7, 7]
