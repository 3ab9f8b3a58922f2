"""examples/01-ddp-basics, each script really run, on small settings."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.warm_python import SCRIPTS

FOLDER = Path(__file__).parents[2] / "examples" / "01-ddp-basics"
DIGITS = 1797 - 1797 // 5  # for training
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "DISTRIBUTED_", "SLURM_", "OMPI_", "OMP_NUM_THREADS")


def environ(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return inherited | {"PYTHON": sys.executable} | more


def run(folder: Path, *command: str, **variables: str) -> str:
    """Run a command in a folder and return what it printed; it must succeed."""
    done = subprocess.run(
        command, cwd=folder, env=environ(**variables), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python(folder: Path, *command: str, **variables: str) -> str:
    """The same of `python *command`."""
    return run(folder, *SCRIPTS.command, *command, **variables)


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def history_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "history.json").read_text())


def events_of(run_dir: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_mnist(folder: Path, *, samples: dict[str, int], side: int = 28) -> dict[str, np.ndarray]:
    """MNIST's four files, half of them packed, and the images that they hold."""
    images: dict[str, np.ndarray] = {}
    generator = np.random.default_rng(0)
    for part, count in samples.items():
        images[part] = generator.integers(0, 256, (count, side, side), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        header = b"\x00\x00\x08\x03" + np.array([count, side, side], ">u4").tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images[part].tobytes()))
        header = b"\x00\x00\x08\x01" + np.array([count], ">u4").tobytes()
        (folder / f"{part}-labels.idx1-ubyte").write_bytes(header + labels.tobytes())
    return images


def test_mnist_learns_the_digits_on_two_ranks(tmp_path: Path) -> None:
    printed = python(tmp_path, str(FOLDER / "ddp_mnist.py"), "--num-gpus", "2", "--epochs", "3")
    history = history_of(only_run(tmp_path))
    assert history["world_size"] == 2
    assert [record["samples"] for record in history["epochs"]] == [DIGITS] * 3
    assert history["best_accuracy"] > 0.9
    assert f"best accuracy {history['best_accuracy']:.4f}" in printed
    assert "samples/s" in printed
    assert history["run_dir"] in printed


@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "distributed", "train", "--num-gpus", "2", "--script", "SCRIPT", "--"],
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", "PYTHON", "SCRIPT"],
    ],
    ids=["distributed train", "torchrun"],
)
def test_mnist_joins_the_world_of_a_launcher(tmp_path: Path, launcher: list[str]) -> None:
    words = {"PYTHON": SCRIPTS.command, "SCRIPT": [str(FOLDER / "ddp_mnist.py")]}
    command = [word for part in launcher for word in words.get(part, [part])]
    printed = python(tmp_path, *command, "--epochs", "1")
    assert history_of(only_run(tmp_path))["world_size"] == 2
    assert printed.count("best accuracy") == 1


def test_mnist_idx_files_are_read_and_normalized(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    images = write_mnist(data, samples={"train": 70, "t10k": 21})
    train, test = load_module("digits").load_digits(str(data))
    assert train.tensors[0].shape == (70, 1, 28, 28)
    assert test.tensors[1].tolist() == [index % 10 for index in range(21)]
    mean, deviation = images["train"].astype(np.float64).mean(), images["train"].astype(np.float64).std(ddof=1)
    expected = torch.from_numpy((images["t10k"] - mean) / deviation).float().unsqueeze(1)
    torch.testing.assert_close(test.tensors[0], expected, rtol=1e-4, atol=1e-4)
    python(tmp_path, str(FOLDER / "ddp_mnist.py"), "--num-gpus", "1", "--epochs", "1", "--data-dir", str(data))
    assert history_of(only_run(tmp_path))["epochs"][0]["samples"] == 70


def test_damaged_and_missing_mnist_files_are_named(tmp_path: Path) -> None:
    digits = load_module("digits")
    with pytest.raises(SystemExit, match="train-images"):
        digits.load_digits(str(tmp_path))
    write_mnist(tmp_path, samples={"train": 10, "t10k": 5})
    labels = tmp_path / "t10k-labels.idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=r"t10k-labels.*damaged"):
        digits.load_digits(str(tmp_path))


def test_training_template_resumes_and_logs_to_all_dashboards(tmp_path: Path) -> None:
    settings = ["--num-gpus", "2", "--run-dir", "first"]
    first = python(tmp_path, str(FOLDER / "ddp_training.py"), *settings, "--epochs", "2", "--mixed-precision", "auto")
    assert "mixed precision bf16" in first
    uri = f"sqlite:///{tmp_path / 'tracking.db'}"
    arguments = [*settings, "--epochs", "4", "--mixed-precision", "auto", "--resume", "--mlflow", "digits"]
    python(tmp_path, str(FOLDER / "ddp_training.py"), *arguments, MLFLOW_TRACKING_URI=uri)

    run_dir = tmp_path / "first"
    history = history_of(run_dir)
    steps = -(-DIGITS // (32 * 2 * 2))
    assert [record["steps"] for record in history["epochs"]] == [steps] * 4
    assert history["epochs"][-1]["metrics"]["val_top3"] > 0.9
    assert [event["first_step"] for event in events_of(run_dir, "RunStarted")] == [0, 2 * steps]
    rates = [event["learning_rate"] for event in events_of(run_dir, "StepEnded")]
    assert rates[0] < max(rates) == pytest.approx(4e-3, rel=0.05)
    assert rates[-1] == pytest.approx(4e-5, rel=0.5)
    assert max(path.name for path in (run_dir / "checkpoints").glob("step-*")) == f"step-{4 * steps:06d}"
    assert len(list((run_dir / "tensorboard").iterdir())) == 2
    weights = torch.load(run_dir / "classifier.pt", weights_only=True)
    assert "layers.0.weight" in weights
    with sqlite3.connect(tmp_path / "tracking.db") as database:
        assert database.execute("select count(*) from metrics where key = 'val_top3'").fetchone()[0] == 2


def test_training_template_refuses_resume_without_run_dir(tmp_path: Path) -> None:
    command = [*SCRIPTS.command, str(FOLDER / "ddp_training.py"), "--resume"]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--run-dir" in done.stderr


def test_benchmark_prints_a_row_for_each_number_of_processes(tmp_path: Path) -> None:
    small = ["--steps", "2", "--repeats", "1", "--width", "16", "--batch-size", "8", "--json", "result.json"]
    printed = python(tmp_path, str(FOLDER / "ddp_benchmark.py"), "--processes", "1", "2", *small)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["processes"] for row in rows] == [1, 2]
    assert [line.split()[0] for line in printed.splitlines()[1:]] == ["1", "2"]
    assert rows[1]["speedup"] == pytest.approx(rows[1]["samples_per_second"] / rows[0]["samples_per_second"])
    assert rows[1]["efficiency"] == pytest.approx(rows[1]["speedup"] / 2)


def test_launch_script_trains_two_ranks_on_a_laptop(tmp_path: Path) -> None:
    run(tmp_path, str(FOLDER / "launch_ddp.sh"), "laptop", "2", "--", "--epochs", "1")
    assert history_of(only_run(tmp_path))["world_size"] == 2


def test_launch_script_trains_on_two_nodes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = [str(FOLDER / "launch_ddp.sh"), "nodes", "2", "1", "127.0.0.1", "--", "--epochs", "1"]
    nodes = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environ(MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert history_of(only_run(tmp_path))["world_size"] == 2


@pytest.mark.parametrize("words", [[], ["moon"], ["nodes", "2"], ["laptop", "2", "3"]])
def test_launch_script_shows_usage_on_bad_arguments(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run(
        [str(FOLDER / "launch_ddp.sh"), *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "laptop [processes]" in done.stderr
