"""`DistributedTuner` on one machine, with real processes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.survival import wait_until

ENV = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
PYTHON = sys.executable

# A program that runs one search and writes down what came of it. `OPTIONS` and `train` are each test's own.
PROGRAM = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from distributed import DistributedError, DistributedTuner, tune

{body}

def main():
    tuner = DistributedTuner(train, **OPTIONS, progress=False)
    told = {{}}
    try:
        told["best"] = tuner.tune(SAMPLES)
    except DistributedError as error:
        told["error"] = str(error)
    told["trials"] = [asdict(trial) for trial in tuner.results]
    Path(sys.argv[1]).write_text(json.dumps(told, default=list))

if __name__ == "__main__":
    main()
"""


def runs(pid: int) -> bool:
    """Whether a process is there and more than an entry that nobody has waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def write_program(folder: Path, body: str) -> Path:
    path = folder / "search.py"
    path.write_text(PROGRAM.format(body=body))
    return path


def search(folder: Path, body: str, timeout: float = 120) -> dict:
    """Run a search to its end; its trials by id are under "trials"."""
    program = write_program(folder, body)
    ended = subprocess.run(
        [PYTHON, program, folder / "told.json"], cwd=folder, env=ENV, capture_output=True, text=True, timeout=timeout
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads((folder / "told.json").read_text())
    told["trials"] = {trial["id"]: trial for trial in told["trials"]}
    return told


HALVING = """
OPTIONS = {"search_space": {"x": {"grid": [0, 5, 1, 7, 9, 3, 8, 6]}}, "num_gpus": 1, "metric": "loss",
           "scheduler": "asha", "max_steps": 9, "reduction_factor": 3, "run_dir": "runs"}
SAMPLES = 1

def train(config):
    for step in range(1, 100):
        with open(f"steps-{config['x']}", "a") as file:
            file.write("x")
        tune.report({"loss": config["x"] + 1 / step})
"""


def test_halving_stops_bad_trials_at_their_rung(tmp_path):
    told = search(tmp_path, HALVING)
    spent = {int(path.name.partition("-")[2]): len(path.read_text()) for path in tmp_path.glob("steps-*")}
    assert spent == {0: 9, 5: 1, 1: 1, 7: 1, 9: 1, 3: 1, 8: 1, 6: 1}
    assert told["best"] == {"x": 0}
    assert [trial["status"] for trial in told["trials"].values()] == ["done"] + ["stopped"] * 7


POPULATION = """
OPTIONS = {"search_space": {"rate": {"choice": [1, 2, 3, 4, 50]}, "start": {"grid": [1, 2, 3, 50]}}, "num_gpus": 2,
           "metric": "max:height", "scheduler": "pbt", "perturb_every": 2, "max_steps": 8, "run_dir": "runs"}
SAMPLES = 1

def train(config):
    state = tune.checkpoint() or {"height": config["start"], "path": []}
    while True:
        state["height"] += config["rate"] * 0.01
        state["path"] = [*state["path"], config["start"]]
        tune.report({"height": state["height"]}, checkpoint=state)
"""


def test_population_exploits_and_perturbs(tmp_path):
    told = search(tmp_path, POPULATION)
    trials = told["trials"]
    assert all(trial["status"] == "done" and trial["history"][-1]["step"] == 8 for trial in trials.values())
    taken = [take for trial in trials.values() for take in trial["lineage"]]
    assert taken
    for take in taken:
        assert take["source"] != take["trial"]
        assert take["params"] != trials[take["source"]]["params"] or take["params"] != take["before"]
    best = trials["0003"]
    assert best["lineage"] == []
    assert best["params"]["start"] == 50
    # the state of the one that stands highest went into others: what they report is what only it could reach
    heirs = [trial for trial in trials.values() if any(take["source"] == "0003" for take in trial["lineage"])]
    assert heirs
    for heir in heirs:
        last = Path(heir["checkpoint"], "state.json")
        state = json.loads(last.read_text())
        taken = heir["lineage"][-1]
        assert state["height"] > 50
        assert 50 in state["path"]  # a step that trial 0003 took, also where another heir handed it on
        if taken["source"] == "0003":
            assert state["path"][: taken["source_step"]] == [50] * taken["source_step"]
        assert len(state["path"]) == 8
        assert heir["params"] == heir["lineage"][-1]["params"]


FAILURES = """
OPTIONS = {"search_space": {"x": {"grid": ["good", "raises", "dies", "once", "other"]}}, "num_gpus": 2,
           "metric": "loss", "max_failures": 1, "run_dir": "runs"}
SAMPLES = 1

def train(config):
    x = config["x"]
    Path(f"began-{x}").open("a").write("x")
    if x == "raises":
        raise ValueError("no such thing")
    if x == "dies":
        os.kill(os.getpid(), 9)
    state = tune.checkpoint() or {"step": 0}
    for step in range(state["step"], 4):
        tune.report({"loss": 4 - step - (x == "other")}, checkpoint={"step": step + 1})
        if x == "once" and step == 1 and state["step"] == 0:
            os.abort()
    Path(f"from-{x}").write_text(str(state["step"]))
"""


def test_failed_trial_ends_alone_or_resumes_from_its_checkpoint(tmp_path):
    told = search(tmp_path, FAILURES)
    by_x = {trial["params"]["x"]: trial for trial in told["trials"].values()}
    assert {x: trial["status"] for x, trial in by_x.items()} == {
        "good": "done",
        "raises": "failed",
        "dies": "failed",
        "once": "done",
        "other": "done",
    }
    assert told["best"] == {"x": "other"}
    assert "ValueError: no such thing" in by_x["raises"]["error"]
    assert "SIGKILL" in by_x["dies"]["error"]
    assert [len((tmp_path / f"began-{x}").read_text()) for x in by_x] == [1, 2, 2, 2, 1]
    assert (tmp_path / "from-once").read_text() == "2"
    assert [report["step"] for report in by_x["once"]["history"]] == [1, 2, 3, 4]
    assert "no such thing" in Path(by_x["raises"]["directory"], "log.txt").read_text()


KILLED = """
OPTIONS = {"search_space": {"x": {"grid": [0, 1, 2, 3, 4, 5]}}, "num_gpus": 2, "metric": "loss", "run_dir": "runs",
           "resume": True}
SAMPLES = 1

def train(config):
    state = tune.checkpoint() or {"step": 0}
    with open(f"began-{config['x']}", "a") as file:
        file.write(f"{state['step']} ")
    Path(f"pid-{config['x']}").write_text(str(os.getpid()))
    for step in range(state["step"], 6):
        while config["x"] == 3 and step == 3 and not Path("go").exists():
            time.sleep(0.02)
        tune.report({"loss": config["x"] + 6 - step}, checkpoint={"step": step + 1})
"""


def test_killed_search_resumes_only_unfinished_trials(tmp_path):
    program = write_program(tmp_path, KILLED)
    driver = subprocess.Popen([PYTHON, program, "told.json"], cwd=tmp_path, env=ENV)
    held = tmp_path / "runs" / "trials" / "0003" / "checkpoints" / "000003"
    wait_until(held.exists, 60)
    wait_until(lambda: (tmp_path / "began-5").exists(), 60)
    wait_until(lambda: '"kind":"ended","id":"0005"' in (tmp_path / "runs" / "trials.jsonl").read_text(), 60)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not runs(int((tmp_path / "pid-3").read_text())), 20)
    (tmp_path / "go").touch()
    told = search(tmp_path, KILLED)
    assert told["best"] == {"x": 0}
    assert all(trial["status"] == "done" for trial in told["trials"].values())
    began = {x: (tmp_path / f"began-{x}").read_text().split() for x in range(6)}
    assert began == {x: ["0"] for x in (0, 1, 2, 4, 5)} | {3: ["0", "3"]}
    assert [report["step"] for report in told["trials"]["0003"]["history"]] == [1, 2, 3, 4, 5, 6]


MISREAD = """
OPTIONS = {"search_space": {"x": {"uniform": [0, 1]}, "learning_rte": {"uniform": [0, 1]}}, "num_gpus": 1,
           "run_dir": "runs"}
SAMPLES = 50

def train(config):
    Path("trials").open("a").write("x")
    return {"loss": config["x"] * config.get("learning_rate", 0.1)}
"""


def test_unread_parameter_ends_search_after_the_first_trials(tmp_path):
    told = search(tmp_path, MISREAD)
    assert "learning_rte, which train never reads" in told["error"]
    assert "did you mean learning_rate?" in told["error"]
    assert len((tmp_path / "trials").read_text()) <= 2


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ('OPTIONS["gpus_per_trial"] = 2', "gpus_per_trial=2, but num_gpus=1"),
        ('OPTIONS["metric"] = "accuracy"', "without having reported 'accuracy'"),
        ('train = lambda config: 1 / 0 + config["x"]', "all 3 trials failed"),
        ('train = lambda config: {"a": config["x"], "b": 1}', "no metric is named"),
        ('train = lambda config: config["x"]', "does not say which is best"),
    ],
)
def test_impossible_search_is_refused_with_its_reason(tmp_path, change, part):
    body = """
OPTIONS = {"search_space": {"x": {"uniform": [0, 1]}}, "num_gpus": 1, "run_dir": "runs"}
SAMPLES = 3
def train(config):
    return {"loss": config["x"]}
"""
    assert part in search(tmp_path, f"{body}\n{change}\n")["error"]


MANY = """
DEVICES = os.cpu_count() + 2
OPTIONS = {"search_space": {"x": {"grid": list(range(DEVICES))}}, "num_gpus": DEVICES, "metric": "loss",
           "engine": sys.argv[2], "run_dir": sys.argv[2]}
SAMPLES = 1

def train(config):
    mine = Path(OPTIONS["run_dir"], f"met-{config['x']}")
    mine.touch()
    while len(list(mine.parent.glob("met-*"))) < DEVICES:
        time.sleep(0.02)
    return {"loss": config["x"]}
"""


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_more_trials_than_cores_run_at_a_time(engine, tmp_path):
    """Each ends once all have begun; with Ray, on the cluster that is started on this machine for the search."""
    program = write_program(tmp_path, MANY)
    ended = subprocess.run(
        [PYTHON, program, "told.json", engine], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "told.json").read_text())["best"] == {"x": 0}


INTERRUPTED = """
OPTIONS = {"search_space": {"x": {"uniform": [0, 1]}}, "num_gpus": 2, "metric": "loss", "run_dir": "runs"}
SAMPLES = 9

def train(config):
    tune.report({"loss": config["x"]})
    try:
        Path(f"pid-{os.getpid()}").touch()
        time.sleep(600)
    finally:
        Path(f"cleaned-{os.getpid()}").touch()
"""


def test_ctrl_c_ends_all_trials_and_keeps_their_results(tmp_path):
    program = write_program(tmp_path, INTERRUPTED)
    driver = subprocess.Popen([PYTHON, program, "told.json"], cwd=tmp_path, env=ENV, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, 60)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(60) != 0
    pids = [path.name.partition("-")[2] for path in tmp_path.glob("pid-*")]
    wait_until(lambda: not any(runs(int(pid)) for pid in pids), 20)
    assert all((tmp_path / f"cleaned-{pid}").exists() for pid in pids)
    rows = list(csv.DictReader((tmp_path / "runs" / "results.csv").open()))
    assert [(row["status"], row["steps"]) for row in rows] == [("interrupted", "1")] * 2
    assert (tmp_path / "runs" / "best.yaml").exists()


# Trials that train with the Trainer: alone and as two ranks, stopped early, and taken over by others.
TRAINED = """
RUN = sys.argv[2]
RATES = {"loguniform": [1e-6, 0.2]}  # with this seed, the first is good and the second far too low
SAMPLES, OPTIONS = {
    "ranks": (1, {"search_space": {"lr": RATES, "ranks": 2}, "gpus_per_trial": 2, "num_gpus": 2, "max_steps": 2}),
    "population": (2, {"search_space": {"lr": RATES, "ranks": 1}, "num_gpus": 1, "scheduler": "pbt", "perturb_every": 2,
                       "resample_probability": 0}),
}[RUN]
OPTIONS |= {"metric": "val_loss", "seed": 8, "run_dir": RUN}

def train(config):
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from distributed import Trainer

    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    torch.manual_seed(1)
    trainer = Trainer(nn.Linear(4, 1), loss_fn=nn.MSELoss(), optimizer="sgd", learning_rate=config["lr"],
                      num_gpus=config["ranks"], batch_size=16, epochs=6, device="cpu")
    return trainer.fit(data, data)
"""


def trained(folder: Path, kind: str) -> dict:
    program = write_program(folder, TRAINED)
    command = [PYTHON, program, "told.json", kind]
    ended = subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    told = json.loads((folder / "told.json").read_text())
    assert "error" not in told, told
    return {trial["id"]: trial for trial in told["trials"]}


def events(trial: dict, run: str, kind: str) -> list[dict]:
    lines = Path(trial["directory"], run, "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_stopped_trial_of_two_ranks_ends_with_a_checkpoint(tmp_path):
    (trial,) = trained(tmp_path, "ranks").values()
    assert trial["status"] == "done"
    assert [report["step"] for report in trial["history"]] == [1, 2]
    assert events(trial, "run", "RunStarted")[0]["world_size"] == 2
    (ended,) = events(trial, "run", "RunEnded")
    assert ended["status"] == "interrupted"
    assert 8 < ended["step"] < 24  # two epochs have 8 steps, and it was to make six
    assert Path(ended["model_path"], "manifest.json").exists()


def test_population_of_trainers_resumes_the_best_checkpoint(tmp_path):
    good, heir = trained(tmp_path, "population").values()
    assert heir["lineage"][0]["source"] == good["id"]
    rate = heir["params"]["lr"]
    assert rate / good["params"]["lr"] == pytest.approx(0.8) or rate / good["params"]["lr"] == pytest.approx(1.2)
    assert heir["lineage"][0]["before"]["lr"] < 1e-5
    run = f"run-{len(heir['lineage'])}"
    assert events(heir, run, "RunStarted")[0]["first_step"] > 0
    assert {event["learning_rate"] for event in events(heir, run, "StepEnded")} == {rate}
    assert heir["history"][-1]["step"] == 6
    assert heir["history"][-1]["metrics"]["val_loss"] < 0.2 * heir["history"][0]["metrics"]["val_loss"]


def test_all_trials_are_forked_from_one_process(tmp_path):
    body = """
OPTIONS = {"search_space": {"x": {"uniform": [0, 1]}}, "num_gpus": 1, "metric": "loss", "run_dir": "runs"}
SAMPLES = 6
def train(config):
    return {"loss": config["x"], "pid": os.getppid()}
"""
    told = search(tmp_path, body)
    parents = {trial["metrics"]["pid"] for trial in told["trials"].values()}
    assert len(parents) == 1


LEFT = """
OPTIONS = {"search_space": {"x": {"uniform": [0, 1]}}, "num_gpus": 1, "metric": "loss", "run_dir": "runs"}
SAMPLES = 1
STAYS = "import os, signal, time; signal.signal(15, 1); open('left', 'w').write(str(os.getpid())); time.sleep(600)"
def train(config):
    import subprocess
    subprocess.Popen([sys.executable, "-c", STAYS])
    while not (Path("left").exists() and Path("left").read_text()):
        time.sleep(0.02)
    return {"loss": config["x"]}
"""


def test_process_left_by_a_trial_is_killed(tmp_path):
    told = search(tmp_path, LEFT)
    assert told["trials"]["0000"]["status"] == "done"
    assert not runs(int((tmp_path / "left").read_text()))
