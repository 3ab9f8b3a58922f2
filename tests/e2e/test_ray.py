"""Runs on a Ray cluster of several nodes: as exact as on one machine, also when workers, nodes and drivers die."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils import _pytree as pytree

from distributed.checkpoint.reading import load
from distributed.core.heartbeat import heartbeat_path, read_beat
from distributed.data.ledger import check_ledgers
from tests.ray_clusters import RayNode, RayNodes

SCRIPT = """
import sys, time, torch
from torch import nn
from torch.utils.data import Dataset
from distributed import {trainer}

class Samples(Dataset):
    def __init__(self, pause):
        self.pause = pause

    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(self.pause)
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3

class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("a mistake of the script")

if __name__ == "__main__":
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    if "broken" in sys.argv:
        model.append(Broken())
    settings = dict(batch_size=4, epochs=2, checkpoint_frequency="4 steps", log_every_n_steps=4)
    settings |= dict(lr=0.01, hidden=16) if "{trainer}" == "RayTrainer" else dict(learning_rate=0.01)
    settings |= dict(word.split("=") for word in sys.argv[2:] if "=" in word)
    trainer = {trainer}(model, settings)
    history = trainer.fit(Samples(float(sys.argv[1])))
    print("steps", history.steps, flush=True)
    if "{trainer}" == "RayTrainer":
        print("accuracy", trainer.best_accuracy, "result", trainer.result.metrics, trainer.result.checkpoint.path)
        print("held", sum(p.abs().sum().item() for p in model.parameters()))
"""
STEPS, SAMPLES = 24, 96


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
        self.node: RayNode | None = self.nodes.join(cpus=1)

    def start(self, run_dir: str, *words: str, pause: float = 0.06, ranks: int = 2) -> subprocess.Popen[str]:
        settings = [word for word in words if word != "broken"]
        rest = ["--", str(pause), *(word for word in words if word == "broken")]
        command = ["train", "--script", "train.py", "--num-gpus", str(ranks), "--backend", "ray", "--run-dir", run_dir]
        command += ["--address", self.nodes.address, *settings, *rest]
        return self.driver("-m", "distributed.cli", *command)

    def driver(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *command], cwd=self.folder, env=self.nodes.environ, stdout=pipe, stderr=pipe, text=True
        )

    def replace_node(self) -> None:
        assert self.node is not None
        self.node.kill()
        self.node = self.nodes.join(cpus=1)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    yield cluster
    cluster.nodes.close()


@pytest.fixture(scope="module")
def local(folder: Path) -> dict[str, torch.Tensor]:
    """The state after the same run on two processes of this machine."""
    command = ["train", "--script", "train.py", "--num-gpus", "2", "--backend", "pytorch-ddp", "--run-dir", "local"]
    done = subprocess.run(
        [sys.executable, "-m", "distributed.cli", *command, "--", "0"], cwd=folder, capture_output=True, text=True
    )
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


def reaches(run_dir: Path, attempt: int, step: int, driver: subprocess.Popen[str]) -> None:
    """Wait until rank 0 of an attempt has finished so many steps of the run."""
    path = heartbeat_path(run_dir / "attempts" / str(attempt), 0)
    until(lambda: (beat := read_beat(path)) is not None and beat.step >= step, driver)


def places(run_dir: Path, attempt: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run_dir / "attempts" / str(attempt)).glob("place-*.json"))]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_ranks_that_ray_places_train_as_those_of_this_machine(
    cluster: Cluster, folder: Path, local: dict[str, torch.Tensor]
) -> None:
    settings = ["num_gpus=2", f"address={cluster.nodes.address}", "run_dir=placed"]
    told = finish(cluster.driver("train_ray.py", "0", *settings))
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


def test_a_killed_worker_and_a_killed_node_change_no_byte(
    cluster: Cluster, folder: Path, local: dict[str, torch.Tensor]
) -> None:
    run_dir = folder / "killed"
    driver = cluster.start("killed")
    reaches(run_dir, 0, 6, driver)
    os.kill(places(run_dir, 0)[1]["pid"], signal.SIGKILL)
    reaches(run_dir, 1, 14, driver)
    cluster.replace_node()
    told = finish(driver)
    assert_same_bytes(state(run_dir), local)
    assert [event["cause"] for event in events(run_dir, "AttemptEnded")] == ["machine", "machine"]
    first, second = [event["step"] for event in events(run_dir, "Recovered")]
    assert (first % 4, second % 4) == (0, 0)
    assert 0 < first < second
    assert events(run_dir, "AttemptEnded")[0]["rank"] == 1
    assert all(event["passed"] is not False for event in events(run_dir, "ResumeCompared"))
    assert "3 attempts, done at step 24" in told


def test_a_run_that_is_stopped_and_one_whose_driver_is_killed_go_on_where_they_were(
    cluster: Cluster, folder: Path, local: dict[str, torch.Tensor]
) -> None:
    run_dir = folder / "stopped"
    driver = cluster.start("stopped")
    reaches(run_dir, 0, 5, driver)
    driver.send_signal(signal.SIGINT)
    assert "asked to stop and save" in finish(driver, exit_code=130)
    assert json.loads((run_dir / "history.json").read_text())["interrupted"]

    driver = cluster.start("stopped", "resume_from_checkpoint=true")
    reaches(run_dir, 1, 14, driver)
    ranks = [place["pid"] for place in places(run_dir, 1)]
    driver.kill()
    driver.communicate()
    until(lambda: not any(psutil.pid_exists(pid) for pid in ranks))

    finish(cluster.start("stopped", "resume_from_checkpoint=true", pause=0))
    assert_same_bytes(state(run_dir), local)


def test_a_mistake_of_the_script_ends_the_run_at_once(cluster: Cluster, folder: Path) -> None:
    told = finish(cluster.start("broken", "broken", pause=0), exit_code=1)
    assert "ValueError: a mistake of the script" in told
    assert str(folder / "broken" / "attempts" / "0" / "rank-") in told
    assert not (folder / "broken" / "attempts" / "1").exists()
    assert [event["rank"] in (0, 1) for event in events(folder / "broken", "RankFailed")] == [True]


def test_more_ranks_than_the_cluster_has_are_refused(cluster: Cluster, folder: Path) -> None:
    told = finish(cluster.start("many", ranks=5, pause=0), exit_code=3)
    assert "5 CPUs asked for, and the Ray cluster has 2" in told
    assert "num_gpus=2" in told


def test_a_node_that_joins_is_used(cluster: Cluster, folder: Path) -> None:
    assert cluster.node is not None
    cluster.node.kill()
    run_dir = folder / "grown"
    driver = cluster.start("grown", "min_gpus=1", "sample_ledger=true", pause=0.15)
    reaches(run_dir, 0, 3, driver)
    cluster.node = cluster.nodes.join(cpus=1)
    told = finish(driver)
    started = events(run_dir, "RunStarted")
    assert [event["world_size"] for event in started] == [1, 2]
    assert {event["global_batch"] for event in started} == {8}
    assert [event["cause"] for event in events(run_dir, "AttemptEnded")] == ["resize"]
    assert f"done at step {STEPS}" in told
    assert check_ledgers(run_dir / "ledger", SAMPLES).is_exact


def test_a_cluster_that_wants_a_token_is_not_taken_for_one_that_does_not_answer(cluster: Cluster, folder: Path) -> None:
    command = ["train", "--script", "train.py", "--num-gpus", "2", "--address", cluster.nodes.address, "--", "0"]
    environ = {name: value for name, value in cluster.nodes.environ.items() if name != "RAY_AUTH_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "distributed.cli", *command],
        cwd=folder,
        env=environ | {"HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert "answers, and did not let this process in" in done.stderr
    assert "RAY_AUTH_MODE=token" in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:{dead}", "ray://127.0.0.1:{dead}", "127.0.0.1:{silent}", "auto"])
def test_an_address_that_does_not_answer_is_told_with_what_was_tried(folder: Path, address: str) -> None:
    with socket.socket() as dead, socket.socket() as silent:
        dead.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = address.format(dead=dead.getsockname()[1], silent=silent.getsockname()[1])
        command = ["train", "--script", "train.py", "--num-gpus", "2", "--address", where, "--run-dir", "unanswered"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        done = subprocess.run(
            [sys.executable, "-m", "distributed.cli", *command, "--", "0"],
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
