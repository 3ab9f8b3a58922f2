"""`DistributedTuner` over Ray Tune, and `RayTrainer` inside a trial of `ray.tune`, on a small cluster."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import clean_environ
from tests.e2e.survival import wait_until
from tests.ray_clusters import RayNodes

PATIENCE_S = 600  # for a program on a machine that others use too

HEAD = """
import json, logging, os, sys, time
from dataclasses import asdict
from pathlib import Path

import ray
from distributed import DistributedError, DistributedTuner, tune

def search(train, samples=1, **options):
    tuner = DistributedTuner(train, progress=False, **options)
    told = {}
    try:
        told["best"] = tuner.tune(samples)
    except DistributedError as error:
        told["error"] = str(error)
    return told | {"trials": {trial.id: asdict(trial) for trial in tuner.results}}
"""

# Each of these is one search; a connection that the program has made itself is used by all of them.
SEARCHES = (
    HEAD
    + """
def halved(config):
    for step in range(1, 100):
        with open(f"steps-{config['x']}", "a") as file:
            file.write("x")
        tune.report({"loss": config["x"] + 1 / step})

def climb(config):
    state = tune.checkpoint() or {"height": config["start"], "path": []}
    while True:
        state = {"height": state["height"] + 0.01 * config["rate"], "path": [*state["path"], config["start"]]}
        tune.report({"height": state["height"]}, checkpoint=state)

def fail(config):
    x = config["x"]
    Path(f"began-{x}").open("a").write("x")
    if x == "raises":
        raise ValueError("no such thing")
    if x == "dies":
        os.kill(os.getpid(), 9)
    state = tune.checkpoint() or {"step": 0}
    for step in range(state["step"], 4):
        tune.report({"loss": 4 - step - (x == "other")}, checkpoint={"step": step + 1})
        if x == "once" and step == 1:
            os.abort()
    Path(f"from-{x}").write_text(str(state["step"]))

def plain(config):
    return {"loss": (config["x"] - 3) ** 2 + config["y"]}

def misread(config):
    Path("misread").open("a").write("x")
    return {"loss": config["x"] * config.get("learning_rate", 0.1)}

def main():
    address = sys.argv[1]
    told = {"through the client": search(plain, search_space={"x": 1, "y": {"grid": [1]}}, run_dir="runs/client",
                                         address="ray://127.0.0.1:1")}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    told["halving"] = search(halved, search_space={"x": {"grid": [0, 5, 1, 7, 3]}}, num_gpus=1, metric="loss",
                             scheduler="asha", max_steps=9, reduction_factor=3, run_dir="runs/halving")
    told["population"] = search(climb, search_space={"rate": {"choice": [1, 2, 50]}, "start": {"grid": [1, 2, 50]}},
                                num_gpus=1, metric="max:height", scheduler="pbt", perturb_every=2, max_steps=6,
                                run_dir="runs/population")
    told["failures"] = search(fail, search_space={"x": {"grid": ["good", "raises", "dies", "once", "other"]}},
                              num_gpus=2, metric="loss", max_failures=1, run_dir="runs/failures")
    space = {"x": {"uniform": [0, 6]}, "y": {"choice": [0, 1]}}
    for kind in ("random", "bayes"):
        for engine in ("ray", "local"):
            told[f"{kind} on {engine}"] = search(plain, 3, search_space=space, metric="loss", search=kind, seed=5,
                                                 num_gpus=1, engine=engine, run_dir=f"runs/{kind}-{engine}")
    told["misread"] = search(misread, 50, search_space={"x": {"uniform": [0, 1]}, "learning_rte": {"uniform": [0, 1]}},
                             num_gpus=1, run_dir="runs/misread")
    for name, options in {"devices": {"num_gpus": 64}, "wide": {"gpus_per_trial": 3},
                          "dense": {"num_gpus": 2, "trials_per_gpu": 16}}.items():
        told[name] = search(plain, search_space=space, run_dir=f"runs/{name}", **options)
    told["connected"] = ray.is_initialized()
    Path("told.json").write_text(json.dumps(told, default=list))

if __name__ == "__main__":
    main()
"""
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    nodes = RayNodes(tmp_path_factory.mktemp("cluster"), head_cpus=2)
    try:
        yield nodes
    finally:
        nodes.close()


def environ(cluster: RayNodes) -> dict[str, str]:
    return clean_environ() | {name: value for name, value in cluster.environ.items() if name.startswith("RAY_")}


def run(cluster: RayNodes, folder: Path, program: str) -> dict[str, Any]:
    """A program to its end, and what it wrote down."""
    (folder / "search.py").write_text(program)
    ended = subprocess.run(
        [cluster.python, "search.py", cluster.address],
        cwd=folder,
        env=environ(cluster),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
    return {**json.loads((folder / "told.json").read_text()), "stdout": ended.stdout, "stderr": ended.stderr}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("searches")


@pytest.fixture(scope="module")
def told(cluster: RayNodes, folder: Path) -> dict[str, Any]:
    return run(cluster, folder, SEARCHES)


def test_halving_stops_bad_trials_at_their_rung(told, folder):
    spent = {int(path.name.partition("-")[2]): len(path.read_text()) for path in folder.glob("steps-*")}
    assert spent == {0: 9, 5: 1, 1: 1, 7: 1, 3: 1}
    assert told["halving"]["best"] == {"x": 0}
    statuses = [trial["status"] for trial in told["halving"]["trials"].values()]
    assert statuses == ["done", "stopped", "stopped", "stopped", "stopped"]


def test_population_exploits_and_perturbs(told):
    trials = told["population"]["trials"]
    assert all(trial["status"] == "done" and trial["history"][-1]["step"] == 6 for trial in trials.values())
    assert trials["0002"]["lineage"] == []
    heirs = [trial for trial in trials.values() if any(take["source"] == "0002" for take in trial["lineage"])]
    assert heirs
    for heir in heirs:
        take = heir["lineage"][-1]
        assert heir["params"] == take["params"] != take["before"]
        state = json.loads(Path(heir["checkpoint"], "state.json").read_text())
        assert state["height"] > 50  # what only trial 0002 could reach
        assert 50 in state["path"][: take["source_step"]]
        assert len(state["path"]) == 6


def test_failed_trial_ends_alone_or_resumes_from_its_checkpoint(told, folder):
    by_x = {trial["params"]["x"]: trial for trial in told["failures"]["trials"].values()}
    statuses = {x: trial["status"] for x, trial in by_x.items()}
    assert statuses == {"good": "done", "raises": "failed", "dies": "failed", "once": "done", "other": "done"}
    assert told["failures"]["best"] == {"x": "other"}
    assert "ValueError: no such thing" in by_x["raises"]["error"]
    assert "SIGKILL" in by_x["dies"]["error"]
    assert [len((folder / f"began-{x}").read_text()) for x in by_x] == [1, 2, 2, 2, 1]
    assert (folder / "from-once").read_text() == "2"
    assert [report["step"] for report in by_x["once"]["history"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("search", ["random", "bayes"])
def test_search_has_the_same_trials_with_and_without_ray(told, search):
    placed, local = told[f"{search} on ray"], told[f"{search} on local"]
    assert placed["best"] == local["best"]
    assert len(placed["trials"]) == 3
    for one, other in zip(placed["trials"].values(), local["trials"].values(), strict=True):
        assert (one["params"], one["metrics"], one["status"]) == (other["params"], other["metrics"], other["status"])


def test_unread_parameter_ends_search_after_the_first_trials(told, folder):
    assert "learning_rte, which misread never reads" in told["misread"]["error"]
    assert len((folder / "misread").read_text()) <= 2


def test_unplaceable_trials_are_refused_naming_the_resources(told):
    assert "num_gpus=64, but the Ray cluster has 2 CPUs and no GPU" in told["devices"]["error"]
    assert "(2 CPUs, 0 GPUs)" in told["devices"]["error"]
    assert "gpus_per_trial=3, but no node has more than 2" in told["wide"]["error"]
    assert "are 32 trials at a time, and the Ray cluster has 2 CPUs" in told["dense"]["error"]
    assert "ray job submit" in told["through the client"]["error"]
    assert not any(told[name]["trials"] for name in ("devices", "wide", "dense", "through the client"))


def test_ray_tune_prints_nothing_and_writes_in_run_directory(told, folder):
    assert told["stdout"] == ""
    assert "Traceback" not in told["stderr"]
    assert (folder / "runs" / "halving" / "ray" / "tune-1").is_dir()
    assert (folder / "runs" / "halving" / "results.csv").exists()
    assert told["connected"]  # the program's own connection stays


KILLED = (
    HEAD
    + """
def train(config):
    state = tune.checkpoint() or {"step": 0}
    with open(f"began-{config['x']}", "a") as file:
        file.write(f"{state['step']} ")
    for step in range(state["step"], 6):
        while config["x"] == 1 and step == 3 and not Path("go").exists():
            Path(f"pid-{os.getpid()}").touch()
            time.sleep(0.02)
        tune.report({"loss": config["x"] + 6 - step}, checkpoint={"step": step + 1})

if __name__ == "__main__":
    found = search(train, search_space={"x": {"grid": [0, 1, 2, 3]}}, num_gpus=2, metric="loss", run_dir="runs",
                   resume=True, address=sys.argv[1])
    Path("told.json").write_text(json.dumps(found | {"connected": ray.is_initialized()}, default=list))
"""
)


def test_killed_search_resumes_only_unfinished_trials(cluster, tmp_path):
    (tmp_path / "search.py").write_text(KILLED)
    driver = subprocess.Popen([cluster.python, "search.py", cluster.address], cwd=tmp_path, env=environ(cluster))
    journal = tmp_path / "runs" / "trials.jsonl"
    wait_until(lambda: journal.exists() and '"kind":"ended","id":"0003"' in journal.read_text(), PATIENCE_S)
    wait_until(lambda: list(tmp_path.glob("pid-*")), PATIENCE_S)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    (left,) = (int(path.name.partition("-")[2]) for path in tmp_path.glob("pid-*"))
    wait_until(lambda: not psutil.pid_exists(left), PATIENCE_S)  # nothing stays running
    (tmp_path / "go").touch()
    told = run(cluster, tmp_path, KILLED)
    assert told["best"] == {"x": 0}
    assert all(trial["status"] == "done" for trial in told["trials"].values())
    began = {x: (tmp_path / f"began-{x}").read_text().split() for x in range(4)}
    assert began == {0: ["0"], 1: ["0", "3"], 2: ["0"], 3: ["0"]}
    assert [report["step"] for report in told["trials"]["0001"]["history"]] == [1, 2, 3, 4, 5, 6]
    assert not told["connected"]


# As the library's guide shows it, with fewer and smaller trials.
SNIPPET = """
import json, logging, sys
from pathlib import Path

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import DistributedTuner, RayTrainer

generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 8, generator=generator)
data = TensorDataset(x, (x.sum(1) > 0).long())
train_loader, val_loader = DataLoader(data, batch_size=32), DataLoader(data, batch_size=64)

def create_model(hidden_size):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 2))

def train_fn(config):
    model = create_model(config["hidden_size"])
    trainer = RayTrainer(model, config)
    trainer.fit(train_loader, val_loader)
    return {"accuracy": trainer.best_accuracy}

def search(config, resources, **options):
    analysis = tune.run(train_fn, config=config, resources_per_trial=resources, verbose=0,
                        storage_path=str(Path("results").absolute()), **options)
    return [{"config": trial.config, "status": trial.status, "last": trial.last_result["accuracy"],
             "epochs": trial.last_result["training_iteration"]} for trial in analysis.trials]

if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    told = {}
    told["as shown"] = search(
        {"hidden_size": tune.choice([16, 32]), "lr": tune.loguniform(1e-3, 1e-2), "batch_size": tune.choice([32, 64]),
         "epochs": 2}, {"cpu": 1}, num_samples=1)
    told["several ranks"] = search(
        {"hidden_size": 16, "lr": tune.grid_search([0.5, 1e-7]), "num_gpus": 2, "epochs": 3, "optimizer": "sgd"},
        {"cpu": 2}, reuse_actors=True,
        scheduler=ASHAScheduler(metric="accuracy", mode="max", grace_period=1, reduction_factor=2))
    told["placed by Ray"] = search(
        {"hidden_size": 16, "lr": 0.01, "epochs": 2}, {"cpu": 0.5}, num_samples=1)
    space = {"hidden_size": 16, "lr": {"grid": [0.5, 1e-7]}, "num_gpus": 2, "epochs": 3, "optimizer": "sgd"}
    tuner = DistributedTuner(train_fn, space, num_gpus=2, gpus_per_trial=2, metric="val_accuracy", scheduler="asha",
                             reduction_factor=2, run_dir="ours", progress=False)
    told["best"] = tuner.tune(1)
    told["ours"] = [{"status": trial.status, "epochs": trial.steps} for trial in tuner.results]
    Path("told.json").write_text(json.dumps(told))
"""


def test_ray_trainer_runs_inside_ray_tune_trials(cluster, tmp_path):
    told = run(cluster, tmp_path, SNIPPET)
    shown, ranks, placed = told["as shown"], told["several ranks"], told["placed by Ray"]
    assert [trial["status"] for trial in (*shown, *ranks, *placed)] == ["TERMINATED"] * 4
    assert [trial["epochs"] for trial in (*shown, *placed)] == [3] * 2  # two epochs, and what train_fn returned
    assert all(trial["last"] > 0.5 for trial in (*shown, *placed))
    assert [trial["epochs"] for trial in ranks] == [4, 1]  # the scheduler heard of its first epoch, and ended it
    assert told["ours"] == [{"status": "done", "epochs": 3}, {"status": "stopped", "epochs": 1}]
    assert told["best"]["lr"] == 0.5
    worlds = [json.loads(path.read_text())["world_size"] for path in tmp_path.glob("ours/trials/*/run/history.json")]
    assert worlds == [2, 2]
