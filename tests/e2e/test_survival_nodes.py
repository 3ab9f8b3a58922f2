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
from distributed.checkpoint.restore.reading import load
from distributed.core.env import JOIN_TOKEN
from distributed.data.checks.ledger import check_ledgers

REASON = Hosts.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SAMPLES, STEPS = 480, 120  # 30 steps an epoch
SCRIPT = f"""
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed import Trainer

torch.manual_seed(0)
x = torch.randn({SAMPLES}, 8)
y = (x[:, 0] > 0).long()


def pace():
    # Until the test has done its worst, a run does not come to its end: all of its steps together take minutes.
    return 0.0 if os.path.exists("hurry") else 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, x):
        time.sleep(pace())
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
    (folder / "train.py").write_text(SCRIPT.replace("time.sleep(pace())", "pass"))
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


def reach(folder: Path, more: int, node: Node) -> None:
    """Until the run has logged so many steps more."""
    first = max((event["step"] for event in events(folder, "StepEnded")), default=0)
    until(lambda: any(event["step"] >= first + more for event in events(folder, "StepEnded")), node)


def until(condition: Callable[[], bool], node: Node) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, node.output.read_text()
        assert node.process.poll() is None, node.output.read_text()
        time.sleep(0.05)


def recovered(folder: Path, count: int, ranks: int, node: Node) -> None:
    """Until there was a further world, of so many ranks."""

    def is_there() -> bool:
        found = events(folder, "Recovered")
        return len(found) >= count and found[-1]["world_size"] == ranks

    until(is_there, node)


def check(folder: Path, expected: str) -> None:
    assert weights(folder) == expected
    report = check_ledgers(folder / "run" / "ledger", SAMPLES, finished=False)
    assert not report.repeated
    assert report.samples == STEPS * 16


def test_node_cut_off_then_killed_shrinks_and_regrows_run(
    tmp_path: Path, hosts: Hosts, start, undisturbed: str
) -> None:
    """Cut off, it comes back; killed, another one comes. Meanwhile the run goes on with one node."""
    first, second = start(0, "--min-nodes", "1"), start(1, "--min-nodes", "1")
    reach(tmp_path, 10, first)
    hosts.cut(1)
    recovered(tmp_path, 1, 1, first)
    hosts.heal(1)
    recovered(tmp_path, 2, 2, first)
    reach(tmp_path, 5, first)
    before = len(events(tmp_path, "Recovered"))
    second.kill()
    recovered(tmp_path, before + 1, 1, first)
    third = start(2, "--min-nodes", "1")
    recovered(tmp_path, before + 2, 2, first)
    (tmp_path / "hurry").touch()
    first.wait(), third.wait()
    assert [event["lost_steps"] for event in events(tmp_path, "Recovered")[before:]] == [0, 0]
    check(tmp_path, undisturbed)


@pytest.mark.parametrize("node_0", [0, 1])
def test_ranks_and_agent_of_a_run_of_fixed_size_are_killed(
    tmp_path: Path, hosts: Hosts, start, undisturbed: str, monkeypatch: pytest.MonkeyPatch, node_0: int
) -> None:
    """A rank of each node; then an agent, also that of node 0, which is started again: nothing is trained without it.

    Host 0 has the store in any case. The other one can be node 0 if it joins first, or asks for it, as here.
    """
    monkeypatch.setenv(JOIN_TOKEN, "one token, which no node has to generate")
    first, second = (start(number, *["--node-rank", "0"] * (number == node_0)) for number in range(2))
    for count, node in enumerate((first, second), 1):
        reach(tmp_path, 10, first)
        agent = psutil.Process(node.process.pid)
        ranks = [p for p in agent.children(recursive=True) if p.parent() != agent and "python" in p.name()]
        ranks[-1].kill()
        recovered(tmp_path, count, 2, first)
    assert [event["lost_steps"] for event in events(tmp_path, "Recovered")] == [0, 0]
    reach(tmp_path, 10, first)
    ended = len(events(tmp_path, "AttemptEnded"))
    second.kill()
    until(lambda: len(events(tmp_path, "AttemptEnded")) > ended, first)  # not only when another one has come
    second = start(1)
    recovered(tmp_path, 3, 2, first)
    (tmp_path / "hurry").touch()
    first.wait(), second.wait()
    assert [event["attempt"] for event in events(tmp_path, "AttemptEnded")] == [0, 1, 2]
    assert {event["world_size"] for event in events(tmp_path, "RunStarted")} == {2}
    check(tmp_path, undisturbed)
