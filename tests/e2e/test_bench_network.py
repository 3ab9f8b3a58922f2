"""`distributed bench network` between hosts of their own, beside a real iperf3: rates as ratios, no seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distributed.bench.network.benchmark import NodesAsked, measure_network
from distributed.bench.network.turns import NetworkAsked
from distributed.chaos.hosts import Host, Hosts
from distributed.core.errors import ConfigError
from tests.conftest import clean_environ

REASON = Hosts.available()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TC = shutil.which("tc") or shutil.which("tc", path="/usr/sbin:/sbin") or ""
IPERF = shutil.which("iperf3") or ""
needs_iperf = pytest.mark.skipif(not (IPERF and TC), reason="iperf3 and tc are needed: apt-get install iperf3 iproute2")
MBIT, AGREES, TRIES = 200, 0.10, 3  # a busy machine may disturb one of the two, which the next try shows


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as found:
        yield found


def begin(host: Host, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "distributed.cli", "bench", "network", "--num-nodes", "2", "--master-addr", "h0"]
    command += ["--seconds", "1", *more]
    return subprocess.Popen(
        host.command(command),
        cwd=folder,
        env=clean_environ(XDG_CACHE_HOME=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(nodes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        shown = [node.communicate(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, out + err) for node, (out, err) in zip(nodes, shown, strict=True)]


@contextmanager
def iperf_server(hosts: Hosts) -> Iterator[None]:
    server = subprocess.Popen(hosts[1].command([IPERF, "-s", "-B", hosts[1].address]), stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def iperf(hosts: Hosts, *more: str) -> float:
    """Gbit/s that its receiver counts, from h0 to h1 unless told otherwise."""
    command = hosts[0].command([IPERF, "-c", hosts[1].address, "-t", "1", "-O", "1", "-J", *more])
    for _ in range(100):
        told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
        if "sum_received" in told.get("end", {}):
            return float(told["end"]["sum_received"]["bits_per_second"]) / 1e9
        time.sleep(0.1)  # the server does not listen yet, or is busy with the last one
    raise AssertionError(told)


def measured(hosts: Hosts, folder: Path, *more: str) -> dict[str, Any]:
    target = folder / "network.json"
    first = begin(hosts[0], folder, "--node-rank", "0", "--json", str(target), *more)
    nodes = [first, begin(hosts[1], folder, "--node-rank", "1")]
    for code, shown in ended(nodes):
        assert code == 0, shown
        assert "round trips" in shown
        assert "TCP, both ways" in shown
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def rates(record: dict[str, Any]) -> dict[tuple[int, str, int], float]:
    by_host = {node["rank"]: node["host"] for node in record["nodes"]}
    return {
        (row["streams"], row["kind"], int(by_host[row["from"]] == "h1")): row["gbit_s"] for row in record["throughput"]
    }


@needs_hosts
@needs_iperf
def test_rates_on_a_shaped_link_agree_with_iperf3(hosts: Hosts, tmp_path: Path) -> None:
    shape = ["dev", "eth0", "root", "tbf", "rate", f"{MBIT}mbit", "burst", "128kb", "latency", "50ms"]
    for host in (hosts[0], hosts[1]):
        subprocess.run(host.command([TC, "qdisc", "add", *shape]), check=True)
    apart = {}
    for _ in range(TRIES):
        with iperf_server(hosts):
            peer = {(1, 0): iperf(hosts), (1, 1): iperf(hosts, "-R"), (3, 0): iperf(hosts, "-P", "3")}
        record = measured(hosts, tmp_path, "--streams", "3")
        found = rates(record)
        apart = {key: abs(found[key[0], "stream", key[1]] / rate - 1) for key, rate in peer.items()}
        if max(apart.values()) <= AGREES:
            break
    assert max(apart.values()) <= AGREES, (apart, found, peer)
    assert all(rate < MBIT / 1000 for rate in found.values()), "more than the link lets through"
    assert found.keys() == {(count, "stream", way) for count in (1, 3) for way in (0, 1)} | {
        (3, "both", 0),
        (3, "both", 1),
    }
    (trips,) = record["latency"]
    assert 0 < trips["low_us"] <= trips["median_us"] <= trips["p99_us"]
    assert {node["interface"] for node in record["nodes"]} == {"eth0"}
    assert record["settings"]["streams"] == 3, "those of node 0 are measured on all nodes"


@needs_hosts
def test_wrong_interface_is_refused_before_nodes_meet(hosts: Hosts, tmp_path: Path) -> None:
    ((code, shown),) = ended([begin(hosts[0], tmp_path, "--interface", "eth7")])
    assert code == 2
    assert "--interface eth7: this machine has no such interface" in shown
    assert "eth0 (ethernet), lo (loopback)" in shown


@needs_hosts
def test_lost_node_is_named_by_the_other(hosts: Hosts, tmp_path: Path) -> None:
    ranked = [(*("--node-rank", str(rank)), "--seconds", "30") for rank in range(2)]
    nodes = [begin(hosts[rank], tmp_path, *more) for rank, more in enumerate(ranked)]
    assert nodes[0].stderr is not None
    said = [nodes[0].stderr.readline() for _ in range(2)]
    assert said[-1] == "this is node 0 of h0, h1, over eth0\n", said
    nodes[1].kill()
    code, shown = ended(nodes)[0]
    assert code == 3, shown
    assert "node 1 (h1)" in shown


@needs_hosts
def test_node_without_the_token_takes_no_part(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    tokens = ("--join-token", "0123456789abcdef"), ("--join-token", "fedcba9876543210")
    nodes = [begin(hosts[0], tmp_path / "a", *tokens[0]), begin(hosts[1], tmp_path / "b", *tokens[1])]
    try:
        shown = nodes[1].communicate(timeout=120)[1]
        assert nodes[1].returncode == 3
        assert "not let into the run at h0" in shown
        assert nodes[0].poll() is None, "it waits for one that is let in"
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def test_options_of_several_nodes_are_refused_on_one() -> None:
    with pytest.raises(ConfigError, match="--master-addr, but --num-nodes is 1"):
        measure_network(NodesAsked(master_addr="h0"), NetworkAsked(), "", notify=lambda *a: None, say=print)


def test_one_machine_measures_its_own_loopback(tmp_path: Path) -> None:
    target = tmp_path / "loopback.json"
    command = [sys.executable, "-m", "distributed.cli", "bench", "network", "--seconds", "0.2", "--streams", "1"]
    done = subprocess.run([*command, "--json", str(target)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads(target.read_text())
    assert [(row["kind"], row["from"], row["to"]) for row in record["throughput"]] == [
        ("stream", 0, 1),
        ("stream", 1, 0),
        ("both", 1, 0),
        ("both", 0, 1),
    ]
    assert all(0 < row["low_gbit_s"] <= row["gbit_s"] <= row["high_gbit_s"] for row in record["throughput"])
