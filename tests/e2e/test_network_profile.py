"""network_profile on hosts of their own: what reaches the ranks, what is said and measured, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.chaos.hosts import Host, Hosts
from distributed.core.plan import Plan
from tests.conftest import clean_environ

REASON = Hosts.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TRAIN = """
import json, os, torch
from distributed import Trainer
from torch.utils.data import TensorDataset

torch.manual_seed(0)
trainer = Trainer(torch.nn.Linear(4, 1), batch_size=4, epochs=1, device="cpu", progress=False)
trainer.fit(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)))
names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "DISTRIBUTED_NETWORK")
print("found", json.dumps([os.environ.get(name) for name in names]), flush=True)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as found:
        yield found


def start(host: Host, folder: Path, command: list[str], **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        host.command([sys.executable, *command]),
        cwd=folder,
        env=clean_environ(XDG_CACHE_HOME=str(folder), **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*nodes: subprocess.Popen[str]) -> list[str]:
    try:
        return [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def train(*settings: str) -> list[str]:
    command = ["-m", "distributed.cli", "train", "--script", "train.py", "--num-nodes", "2", "--gpus-per-node", "1"]
    return [*command, "--master-addr", "h0", "--run-dir", "run", *settings]


def test_profile_reaches_ranks_and_is_measured(hosts: Hosts, folder: Path) -> None:
    first = start(hosts[0], folder, train("--node-rank", "0", "network_profile=auto"), TP_SOCKET_IFNAME="lo")
    second = start(hosts[1], folder, train("--node-rank", "1", "network_profile=auto"))
    shown = finish(first, second)
    assert [node.returncode for node in (first, second)] == [0, 0], shown
    assert '["eth0", "lo", "GLOO_SOCKET_IFNAME"]' in shown[0]
    assert '["eth0", "eth0", "GLOO_SOCKET_IFNAME,TP_SOCKET_IFNAME"]' in shown[1]
    assert shown[0].count("GLOO_SOCKET_IFNAME=eth0: the other nodes are reached over it") == 1
    assert "TP_SOCKET_IFNAME=lo is kept" in shown[0]
    decisions = [str(decision) for decision in Plan.read(folder / "run").decisions]
    (measured,) = [text for text in decisions if text.startswith("the network carries ")]
    assert "measured between 2 nodes" in measured
    assert "of the 10 Gbit/s of the slowest interface" in measured
    assert measured in shown[0]


def test_wrong_interface_ends_a_node_before_the_rendezvous(hosts: Hosts, folder: Path) -> None:
    node = start(hosts[0], folder, train(), GLOO_SOCKET_IFNAME="eth7")
    (shown,) = finish(node)
    assert node.returncode == 2
    assert "GLOO_SOCKET_IFNAME=eth7, but this machine has no interface eth7" in shown
    assert "there is eth0 (ethernet), lo (loopback)" in shown
    assert not (folder / "run").exists()


def test_wrong_interface_under_another_launcher_names_the_rank(hosts: Hosts, folder: Path) -> None:
    about = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"}
    about |= {"MASTER_ADDR": "h0", "MASTER_PORT": "29555"}
    node = start(hosts[1], folder, ["train.py"], RANK="1", GROUP_RANK="1", GLOO_SOCKET_IFNAME="eth7", **about)
    (shown,) = finish(node)
    assert node.returncode != 0
    assert "rank 1 on h1: GLOO_SOCKET_IFNAME=eth7, but this machine has no interface eth7" in shown


def test_doctor_shows_the_interfaces_of_a_host(hosts: Hosts, folder: Path) -> None:
    (shown,) = finish(start(hosts[0], folder, ["-m", "distributed.cli", "doctor", "--network", "--json"]))
    told = json.loads(shown)
    assert [one["name"] for one in told["machine"]["interfaces"]] == ["eth0", "lo"]
    assert told["machine"]["interfaces"][0]["addresses"][0] == hosts[0].address
    assert (told["carrier"], told["machine"]["interfaces"][0]["kind"]) == ("eth0", "ethernet")
    assert {each["name"]: each["value"] for each in told["proposals"]}["GLOO_SOCKET_IFNAME"] == "eth0"
    (text,) = finish(start(hosts[0], folder, ["-m", "distributed.cli", "doctor", "--network"]))
    assert "eth0 → other nodes" in text
    assert "GLOO_SOCKET_IFNAME=eth0" in text
