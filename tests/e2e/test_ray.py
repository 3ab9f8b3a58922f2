"""Runs on a Ray cluster of several nodes: as exact as on one machine, also when workers, nodes and drivers die."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils import _pytree as pytree

from distributed.checkpoint.restore.reading import load
from distributed.core.protocol.heartbeat import read_beat
from distributed.core.run_dir import RunDir
from distributed.data.checks.ledger import check_ledgers
from tests.conftest import cli
from tests.ray_clusters import RayNode, RayNodes
from tests.ray_template import ray_template

# A model that stands still after some calls, until it is let go: what happens then does not depend on how fast it is.
SCRIPT = """
import os, sys, time, torch
from pathlib import Path
from torch import nn
from torch.utils.data import Dataset
from distributed import {trainer}

class Samples(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3

class Waits(nn.Module):
    def __init__(self, most, until):
        super().__init__()
        self.calls, self.most, self.until = 0, most, until

    def forward(self, x):
        self.calls += 1
        while self.most and self.calls > self.most and not self.is_let_go():
            time.sleep(0.02)
        if self.most:
            time.sleep(0.2)  # enough steps are left when it is asked to stop
        return x

    def is_let_go(self):
        return Path(self.until).exists() or os.environ["WORLD_SIZE"] == self.until

class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("a mistake of the script")

if __name__ == "__main__":
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    model.append(Broken() if sys.argv[1] == "broken" else Waits(int(sys.argv[1]), sys.argv[2]))
    settings = dict(batch_size=4, epochs=2, checkpoint_frequency="4 steps", log_every_n_steps=4)
    settings |= dict(lr=0.01, hidden=16) if "{trainer}" == "RayTrainer" else dict(learning_rate=0.01)
    settings |= dict(word.split("=") for word in sys.argv[3:])
    trainer = {trainer}(model, settings)
    history = trainer.fit(Samples())
    print("steps", history.steps, flush=True)
    if "{trainer}" == "RayTrainer":
        print("accuracy", trainer.best_accuracy, "result", trainer.result.metrics, trainer.result.checkpoint.path)
        print("held", sum(p.abs().sum().item() for p in model.parameters()))
"""
STEPS, SAMPLES = 24, 96
# Nodes of one machine are one to Ray, and need no interface: so what every GPU node gets is looked for.
DRIVER = """
import os, sys
from distributed.engines.ray.launcher import RayLauncher
from distributed.launch.request import LaunchRequest
from distributed.planner.decisions.network import NodeNetwork
from distributed.planner.network.proposals import NetworkRun

network = NodeNetwork("auto", NetworkRun(device="cuda"))
RayLauncher().run(LaunchRequest(("shows.py",), "shown", ranks_per_node=2, address=sys.argv[1], network=network))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    for name, trainer in (("train.py", "Trainer"), ("train_ray.py", "RayTrainer")):
        (folder / name).write_text(SCRIPT.replace("{trainer}", trainer))
    return folder


class Cluster:
    """The test cluster: a head and a node, each with room for one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, RayNodes(folder, head_cpus=1)
        self.node: RayNode | None = None

    def with_node(self) -> Cluster:
        if self.node is None:
            self.node = self.nodes.join(cpus=1)
        return self

    def without_node(self) -> Cluster:
        if self.node is not None:
            self.node.kill()
            self.node = None
        return self

    def start(self, run_dir: str, *settings: str, script: str = "0 -", ranks: int = 2) -> subprocess.Popen[str]:
        command = ["train", "--script", "train.py", "--num-gpus", str(ranks), "--backend", "ray", "--run-dir", run_dir]
        command += ["--address", self.nodes.address, *settings, "--", *script.split()]
        return self.driver("-m", "distributed.cli", *command)

    def driver(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [self.nodes.python, *command], cwd=self.folder, env=self.nodes.environ, stdout=pipe, stderr=pipe, text=True
        )


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Cluster]:
    head = Cluster(folder)
    yield head
    head.nodes.close()


@pytest.fixture
def cluster(head: Cluster) -> Cluster:
    return head.with_node()


@pytest.fixture(scope="module")
def local(folder: Path) -> dict[str, torch.Tensor]:
    """The state after the same run on two processes of this machine."""
    command = ["train", "--script", "train.py", "--num-gpus", "2", "--backend", "pytorch-ddp", "--run-dir", "local"]
    done = cli(folder, *command, "--", "0", "-")
    assert done.returncode == 0, done.stderr
    return state(folder / "local")


def state(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    shared = load(str(run_dir / "checkpoints" / f"step-{step:06d}"), ranks=()).shared
    leaves, _ = pytree.tree_flatten_with_path(shared)
    return {str(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def assert_same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def finish(driver: subprocess.Popen[str], exit_code: int = 0) -> str:
    out, err = driver.communicate(timeout=500)
    assert driver.returncode == exit_code, out + err
    return out + err


def until(is_so: Callable[[], Any], driver: subprocess.Popen[str] | None = None) -> Any:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        if found := is_so():
            return found
        if driver is not None and driver.poll() is not None:
            out, err = driver.communicate()
            raise AssertionError(f"the driver ended with {driver.returncode}\n{out}{err}")
        time.sleep(0.05)
    raise AssertionError("it did not come to pass")


def saves(run_dir: Path, attempt: int, step: int, driver: subprocess.Popen[str]) -> None:
    """Wait until an attempt has made a step more than those of a checkpoint that is there."""
    path, checkpoint = RunDir(run_dir).attempt(attempt).heartbeat(0), run_dir / "checkpoints" / f"step-{step:06d}"
    until(lambda: (beat := read_beat(path)) is not None and beat.step > step, driver)
    until((checkpoint / "manifest.json").exists, driver)


def places(run_dir: Path, attempt: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run_dir / "attempts" / str(attempt)).glob("place-*.json"))]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_network_profile_reaches_ranks_that_ray_placed(cluster: Cluster, folder: Path) -> None:
    (folder / "shows.py").write_text("import os; print(os.environ.get('NCCL_DEBUG'), flush=True)")
    (folder / "drive.py").write_text(DRIVER)
    finish(cluster.driver("drive.py", cluster.nodes.address))
    assert [RunDir(folder / "shown").attempt(0).log(rank).read_text() for rank in range(2)] == ["WARN\n", "WARN\n"]


def test_ray_node_that_joins_grows_the_world(head: Cluster, folder: Path) -> None:
    # Before the test that kills a driver: Ray counts the places of its run as taken for three minutes more.
    cluster = head.without_node()
    run_dir = folder / "grown"
    # On one rank a step has two calls, and it waits after the fifth step for a second rank.
    driver = cluster.start("grown", "min_gpus=1", "sample_ledger=true", script="10 2")
    saves(run_dir, 0, 4, driver)
    cluster.with_node()
    told = finish(driver)
    started = events(run_dir, "RunStarted")
    assert [event["world_size"] for event in started] == [1, 2]
    assert {event["global_batch"] for event in started} == {8}
    assert [event["cause"] for event in events(run_dir, "AttemptEnded")] == ["resize"]
    assert f"done at step {STEPS}" in told
    assert check_ledgers(run_dir / "ledger", SAMPLES).is_exact


def test_ray_ranks_train_to_the_bytes_of_local_ranks(
    cluster: Cluster, folder: Path, local: dict[str, torch.Tensor]
) -> None:
    settings = ["num_gpus=2", f"address={cluster.nodes.address}", "run_dir=placed"]
    told = finish(cluster.driver("train_ray.py", "0", "-", *settings))
    assert_same_bytes(state(folder / "placed"), local)
    assert f"steps {STEPS}" in told
    assert "hidden not used" in told
    shown = re.search(r"accuracy (\S+) result (\{.*\}) (\S+)", told)
    assert shown is not None
    assert float(shown[1]) > 0
    metrics = eval(shown[2])  # what this test's own script printed
    assert metrics["step"] == STEPS
    assert 0 < metrics["accuracy"] <= float(shown[1])
    of_ray = load(shown[3], ranks=()).shared["model"]
    assert_same_bytes(of_ray, load(str(folder / "local/checkpoints/step-000024"), ranks=()).shared["model"])
    held = re.search(r"held (\S+)", told)
    assert held is not None
    assert float(held[1]) == pytest.approx(sum(tensor.abs().sum().item() for tensor in of_ray.values()))


def test_killed_worker_node_and_driver_change_no_byte(
    cluster: Cluster, folder: Path, local: dict[str, torch.Tensor]
) -> None:
    """Each world makes five steps, one more than a checkpoint's; then the next thing happens to it."""
    run_dir, five = folder / "killed", "5 go"
    driver = cluster.start("killed", script=five)
    saves(run_dir, 0, 4, driver)
    os.kill(places(run_dir, 0)[1]["pid"], signal.SIGKILL)
    saves(run_dir, 1, 8, driver)
    cluster.without_node().with_node()
    saves(run_dir, 2, 12, driver)
    driver.send_signal(signal.SIGINT)
    assert driver.stderr is not None
    told = ""
    while "asked to stop and save" not in told:
        line = driver.stderr.readline()
        assert line, told
        told += line
    (folder / "go").touch()
    assert "3 attempts, stopped at step 1" in finish(driver, exit_code=130)
    assert json.loads((run_dir / "history.json").read_text())["interrupted"]
    assert [event["cause"] for event in events(run_dir, "AttemptEnded")] == ["machine", "machine"]
    assert [event["step"] for event in events(run_dir, "Recovered")] == [4, 8]
    assert events(run_dir, "AttemptEnded")[0]["rank"] == 1

    (folder / "go").unlink()
    driver = cluster.start("killed", "resume_from_checkpoint=true", script=five)
    saves(run_dir, 3, 16, driver)
    ranks = [place["pid"] for place in places(run_dir, 3)]
    driver.kill()
    driver.communicate()
    until(lambda: not any(psutil.pid_exists(pid) for pid in ranks))

    finish(cluster.start("killed", "resume_from_checkpoint=true"))
    assert_same_bytes(state(run_dir), local)
    assert all(event["passed"] is not False for event in events(run_dir, "ResumeCompared"))


def test_script_error_ends_the_ray_run_without_restart(cluster: Cluster, folder: Path) -> None:
    told = finish(cluster.start("broken", script="broken"), exit_code=1)
    assert "ValueError: a mistake of the script" in told
    assert str(folder / "broken" / "attempts" / "0" / "rank-") in told
    assert not (folder / "broken" / "attempts" / "1").exists()
    assert [event["rank"] in (0, 1) for event in events(folder / "broken", "RankFailed")] == [True]


def test_more_ranks_than_the_cluster_has_are_refused(cluster: Cluster, folder: Path) -> None:
    told = finish(cluster.start("many", ranks=5), exit_code=3)
    assert "5 CPUs are needed, and the Ray cluster has 2" in told
    assert "num_gpus=2" in told


def test_missing_ray_token_is_reported_as_refused_access(cluster: Cluster, folder: Path) -> None:
    command = ["train", "--script", "train.py", "--num-gpus", "2", "--address", cluster.nodes.address, "--", "0", "-"]
    environ = {name: value for name, value in cluster.nodes.environ.items() if name != "RAY_AUTH_TOKEN"}
    done = subprocess.run(
        [cluster.nodes.python, "-m", "distributed.cli", *command],
        cwd=folder,
        env=environ | {"HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert "answers, and did not let this process in" in done.stderr
    assert "RAY_AUTH_MODE=token" in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:{dead}", "ray://127.0.0.1:{dead}", "127.0.0.1:{silent}", "auto"])
def test_unanswered_ray_address_is_reported(folder: Path, address: str) -> None:
    with socket.socket() as dead, socket.socket() as silent:
        dead.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = address.format(dead=dead.getsockname()[1], silent=silent.getsockname()[1])
        command = ["train", "--script", "train.py", "--num-gpus", "2", "--address", where, "--run-dir", "unanswered"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        done = subprocess.run(
            [ray_template().python, "-m", "distributed.cli", *command, "--", "0", "-"],
            cwd=folder,
            env=environ | {"RAY_TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 3, done.stderr
    assert f"no Ray cluster answers at address='{where}'" in done.stderr
    assert ("RAY_ADDRESS" if where == "auto" else where.removeprefix("ray://")) in done.stderr
    assert not (folder / "unanswered").exists()
