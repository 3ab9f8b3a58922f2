"""Nodes on hosts of their own whose links are cut and healed: nobody hangs, nobody forms a second world."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from distributed.chaos import hosts as hosts_module
from distributed.chaos.hosts import Hosts, remove_leftovers
from tests.agents import Agent

REASON = Hosts.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PORT = 29400
ELASTIC = {"min_nodes": 1, "num_nodes": 2, "max_nodes": 3}


def left_behind(tag: str) -> list[str]:
    return [name for name in hosts_module._all_names() if name.startswith(tag)]


@pytest.fixture
def hosts():
    with Hosts(3) as hosts:
        tag = hosts[0].namespace.partition("n")[0]
        yield hosts
    assert left_behind(tag) == []


@pytest.fixture
def start(hosts):
    with ExitStack() as stack:

        def begin(number: int, **options: Any) -> Agent:
            host = hosts[number]
            return stack.enter_context(Agent(host.name, PORT, on=host.command([]), host="h0", **options))

        yield begin


def places(*agents: Agent) -> list[tuple[int, int, list[str]]]:
    met = [agent.met() for agent in agents]
    assert len({(said["attempt"], said["place"]["master_addr"], said["place"]["master_port"]) for said in met}) == 1
    return [(said["place"]["node_rank"], said["place"]["world_size"], said["hosts"]) for said in met]


def test_partitioned_node_rejoins_when_the_link_heals(hosts, start):
    first, second = start(0, node_rank=0, **ELASTIC), start(1, node_rank=1, **ELASTIC)
    first.gather(), second.gather()
    assert places(first, second) == [(0, 2, ["h0", "h1"]), (1, 2, ["h0", "h1"])]
    hosts.cut(1)
    lost = first.until("lost")
    assert (lost["node_rank"], lost["host"]) == (1, "h1")
    first.gather()
    assert places(first) == [(0, 1, ["h0"])]
    second.until("cut off", "regroup", timeout_s=15.0)
    assert second.said[-1]["kind"] == "cut off"
    second.gather()
    with pytest.raises(AssertionError, match="did not say"):
        second.met(timeout_s=5.0)  # no world of its own
    hosts.heal(1)
    first.until("newcomer")
    first.gather()
    assert places(first, second) == [(0, 2, ["h0", "h1"]), (1, 2, ["h0", "h1"])]
    assert first.said[-1]["attempt"] == 2
    first.do("leave", ok=True), second.do("leave", ok=True)
    assert [agent.until("left")["left"] for agent in (first, second)] == [None, None]


def test_link_that_heals_early_costs_one_rendezvous_round(hosts, start):
    first, second = start(0, node_rank=0, **ELASTIC), start(1, node_rank=1, **ELASTIC)
    first.gather(), second.gather()
    places(first, second)
    hosts.cut(1)
    first.until("lost")
    first.gather()
    assert places(first) == [(0, 1, ["h0"])]
    hosts.heal(1)
    second.until("regroup", "cut off")
    second.gather()
    first.until("newcomer")
    first.gather()
    assert places(first, second) == [(0, 2, ["h0", "h1"]), (1, 2, ["h0", "h1"])]


def test_partitioned_rendezvous_host_keeps_the_only_world(hosts, start):
    agents = [start(number, **ELASTIC | {"num_nodes": 3}) for number in range(3)]
    for agent in agents:
        agent.gather()
    everyone = places(*agents)[0][2]
    assert sorted(everyone) == ["h0", "h1", "h2"]
    hosts.cut(0)
    first, *others = agents
    for agent in others:
        assert agent.until("cut off", "regroup", "lost")["kind"] == "cut off"
        agent.gather()
    first.until("lost"), first.until("lost")
    first.gather()
    assert places(first) == [(0, 1, ["h0"])]
    hosts.heal(0)
    first.until("newcomer")
    for agent in others:
        with pytest.raises(AssertionError, match="did not say"):
            agent.met(timeout_s=1.0)
    first.gather()
    assert sorted(place[:2] for place in places(*agents)) == [(0, 3), (1, 3), (2, 3)]
    assert first.said[-1]["place"]["node_rank"] == 0


def test_node_with_wrong_token_is_refused_and_run_continues(hosts, start):
    first, second = start(0, num_nodes=2, node_rank=0), start(1, num_nodes=2, node_rank=1)
    first.gather(), second.gather()
    places(first, second)
    stranger = start(2, num_nodes=2, join_token="a token of another run", timeout_s=1.0).gather()
    assert "not let into the run at h0" in stranger.until("error")["error"]
    knock = (
        "import os, socket\n"
        "lines = [socket.create_connection(('h0', 29400), 5) for _ in range(200)]\n"
        "for line in lines: line.sendall(os.urandom(64))\n"
    )
    subprocess.run(hosts[2].command([sys.executable, "-c", knock]), check=False, timeout=60)
    first.do("tell", node_rank=0, host="h0", kind="regroup", message="again", cause="newcomer").gather()
    assert second.until("regroup", "cut off", "lost")["message"] == "again"
    second.gather()
    assert places(first, second) == [(0, 2, ["h0", "h1"]), (1, 2, ["h0", "h1"])]


def test_leftover_hosts_of_killed_process_are_removed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\n"
        "from distributed.chaos.hosts import Hosts\n"
        "hosts = Hosts(2).__enter__()\n"
        "print(hosts[0].namespace, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    name = subprocess.run([sys.executable, str(script)], capture_output=True, text=True).stdout.strip()
    tag = name.partition("n")[0]
    assert left_behind(tag)
    assert name in remove_leftovers()
    assert left_behind(tag) == []
