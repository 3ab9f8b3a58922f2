"""Runs over several hosts (network namespaces) that lose nodes, are cut apart, and get nodes: nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distributed.chaos.hosts import Hosts
from distributed.checkpoint.reading import load
from distributed.data.ledger import check_ledgers

REASON = Hosts.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SAMPLES, STEPS = 480, 160  # 30 steps an epoch
SCRIPT = f"""
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed import Trainer

torch.manual_seed(0)
x = torch.randn({SAMPLES}, 8)
y = (x[:, 0] > 0).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, x):
        time.sleep(0.04)
        return self.layers(x)


Trainer(Net(), batch_size=8, epochs=6, max_steps={STEPS}, learning_rate=0.01, lr_schedule="cosine",
        reproducible="bitwise", virtual_ranks=4, gradient_clipping=1.0, sample_ledger=True, log_every_n_steps=5,
        collective_timeout_s=120).fit(TensorDataset(x, y))
"""


class Node:
    """An agent on a host."""

    def __init__(self, host: Any, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--run-dir", "run"]
        command += ["--num-nodes", "2", "--gpus-per-node", "1", "--master-addr", "h0", *options]
        self.output = folder / f"{host.name}-{time.monotonic_ns()}.txt"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
        environ["XDG_CACHE_HOME"] = str(folder / "cache")
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                host.command(command), cwd=folder, stdout=log, stderr=log, env=environ, start_new_session=True
            )

    def kill(self) -> None:
        """The agent alone, without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait(self) -> str:
        code = self.process.wait(150)
        assert code == 0, self.output.read_text()
        return self.output.read_text()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def start(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    (tmp_path / "train.py").write_text(SCRIPT)
    with ExitStack() as stack:

        def begin(number: int, *options: str) -> Node:
            node = Node(hosts[number], tmp_path, *options)
            stack.callback(node.process.kill)
            return node

        yield begin
    deadline = time.monotonic() + 20
    while left := [process.pid for process in psutil.process_iter() if is_of(process, tmp_path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process was started for a run in this folder, and still runs."""
    try:
        is_here = process.cwd() == str(folder)
        return is_here and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.py").write_text(SCRIPT.replace("time.sleep(0.04)", "pass"))
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--run-dir", "run"]
    done = subprocess.run([*command, "--num-gpus", "2"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(folder)


def weights(folder: Path) -> str:
    shared = load(str(folder / "run" / "checkpoints" / f"step-{STEPS:06d}"), ranks=()).shared
    digest = hashlib.sha256()
    for name, tensor in sorted(shared["model"].items()):
        digest.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in found if event["event"] == kind]


def reach(folder: Path, step: int, node: Node) -> None:
    """Until the run has logged a step; what was logged before the world last broke does not count."""
    deadline = time.monotonic() + 120
    while not any(event["step"] >= step for event in events(folder, "StepEnded")):
        assert time.monotonic() < deadline, node.output.read_text()
        assert node.process.poll() is None, node.output.read_text()
        time.sleep(0.05)


def until(condition: Callable[[], bool], node: Node) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, node.output.read_text()
        time.sleep(0.05)


def check(folder: Path, expected: str) -> None:
    assert weights(folder) == expected
    report = check_ledgers(folder / "run" / "ledger", SAMPLES, finished=False)
    assert not report.repeated
    assert report.samples == STEPS * 16


def test_a_node_is_killed_and_another_comes(tmp_path: Path, hosts: Hosts, start, undisturbed: str) -> None:
    """The run shrinks to one node and grows again; its bytes do not show it."""
    first, second = start(0, "--min-nodes", "1"), start(1, "--min-nodes", "1")
    reach(tmp_path, 20, first)
    second.kill()
    until(lambda: any(event["world_size"] == 1 for event in events(tmp_path, "Recovered")), first)
    third = start(2, "--min-nodes", "1")
    until(lambda: any(event["world_size"] == 2 for event in events(tmp_path, "Recovered")), first)
    first.wait(), third.wait()
    assert [event["lost_steps"] for event in events(tmp_path, "Recovered")] == [0, 0]
    check(tmp_path, undisturbed)


def test_a_node_is_cut_off_and_comes_back(tmp_path: Path, hosts: Hosts, start, undisturbed: str) -> None:
    first, second = start(0, "--min-nodes", "1"), start(1, "--min-nodes", "1")
    reach(tmp_path, 20, first)
    hosts.cut(1)
    until(lambda: any(event["world_size"] == 1 for event in events(tmp_path, "Recovered")), first)
    hosts.heal(1)
    until(lambda: any(event["world_size"] == 2 for event in events(tmp_path, "Recovered")), first)
    first.wait(), second.wait()
    check(tmp_path, undisturbed)


def test_a_run_of_fixed_size_waits_for_its_node(tmp_path: Path, hosts: Hosts, start, undisturbed: str) -> None:
    """Its agent is killed, and started again; nothing is trained without it, and no step is lost."""
    first, second = start(0), start(1)
    reach(tmp_path, 20, first)
    second.kill()
    until(lambda: bool(events(tmp_path, "AttemptEnded")), first)
    second = start(1)
    first.wait(), second.wait()
    assert {event["world_size"] for event in events(tmp_path, "RunStarted")} == {2}
    check(tmp_path, undisturbed)


def test_a_rank_of_one_node_is_killed(tmp_path: Path, hosts: Hosts, start, undisturbed: str) -> None:
    first, second = start(0), start(1)
    for step in (20, 60):
        reach(tmp_path, step, first)
        agent = psutil.Process((first if step == 20 else second).process.pid)
        ranks = [p for p in agent.children(recursive=True) if p.parent() != agent and "python" in p.name()]
        ranks[-1].kill()
        count = 1 + (step == 60)
        until(lambda count=count: len(events(tmp_path, "Recovered")) >= count, first)
    first.wait(), second.wait()
    assert [event["lost_steps"] for event in events(tmp_path, "Recovered")] == [0, 0]
    check(tmp_path, undisturbed)
