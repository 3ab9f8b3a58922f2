"""Keras models on ranks that a Ray cluster places: the bytes of local ranks, also when a worker is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.checkpoint.restore.reading import load
from tests.conftest import clean_environ
from tests.ray_clusters import RayNodes
from tests.template import SOCKET
from tests.warm_scripts import warm_tensorflow

# A plain script, and one that a launcher runs. Rank 1 ends once, when it asks for the data of the third epoch.
SCRIPT = """
import os, signal, sys
from pathlib import Path

from distributed import DistributedError, RayTrainer, TensorFlowDistributedTrainer
import keras


def data(epoch):
    import numpy as np
    import tensorflow as tf

    mark = Path("killed")
    if epoch == 2 and os.environ.get("RANK") == "1" and Path("kill").exists() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.random.default_rng(0).normal(size=(36, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(36, seed=epoch).batch(8)


def refusal(**settings):
    try:
        TensorFlowDistributedTrainer(model, backend="ray", run_dir="refused", **settings).fit(data)
    except DistributedError as error:
        print("refused:", error)


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    where = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
    if "address" in where:
        refusal(num_gpus=2, tensorflow_strategy="mirrored")
        refusal(num_gpus=2, hang_timeout_s=5)
        parameters = {"hidden": 3, "epochs": 4, "batch_size": 4} | where
        trainer = RayTrainer(model, parameters, checkpoint_frequency=1, num_gpus=2)
    else:
        trainer = TensorFlowDistributedTrainer(model, epochs=4, checkpoint_frequency=1, batch_size=4, progress=False)
    history = trainer.fit(data)
    print(type(trainer).__name__, "trained on", history.world_size)
"""
STEPS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    pytest.importorskip("keras", reason="the tensorflow extra is not installed")
    nodes = RayNodes(tmp_path_factory.mktemp("cluster"), head_cpus=2)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keras")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def run(folder: Path, *command: str, python: str = sys.executable, environ: dict[str, str]) -> str:
    done = subprocess.run([python, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def launched(run_dir: str, *settings: str) -> tuple[str, ...]:
    return (
        "-m",
        "distributed.cli",
        "train",
        "--script",
        "train.py",
        "--num-gpus",
        "2",
        "--run-dir",
        run_dir,
        *settings,
    )


@pytest.fixture(scope="module")
def local(folder: Path) -> dict[str, Any]:
    """The same training on two processes of this machine."""
    words = launched("local", "--backend", "tensorflow", "tensorflow_strategy=multi_worker")
    run(folder, *words, environ=clean_environ(**{SOCKET: warm_tensorflow().socket}))
    return state(folder / "local")


def state(run_dir: Path) -> dict[str, Any]:
    shared = load(str(run_dir / "checkpoints" / f"step-{STEPS:06d}"), ranks=()).shared
    return {
        f"{part}/{name}": np.asarray(value) for part in ("model", "optimizer") for name, value in shared[part].items()
    }


def causes(run_dir: Path) -> list[tuple[str, int]]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [(event["cause"], event["rank"]) for event in events if event["event"] == "AttemptEnded"]


def assert_same_bytes(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if found[name].tobytes() != value.tobytes()] == []


def test_keras_on_ray_survives_a_killed_worker_with_same_bytes(
    cluster: RayNodes, folder: Path, local: dict[str, Any]
) -> None:
    """`fit` starts the ranks on the cluster; a strategy or a setting that does not go with it is refused."""
    where = [f"address={cluster.address}", "run_dir=placed"]
    (folder / "kill").touch()
    told = run(folder, "train.py", *where, python=cluster.python, environ=cluster.environ)
    (folder / "kill").unlink()
    assert_same_bytes(state(folder / "placed"), local)
    assert causes(folder / "placed") == [("machine", 1)]
    assert "TensorFlowDistributedTrainer trained on 2" in told
    assert "refused: tensorflow_strategy='mirrored' on a cluster" in told
    assert "refused: hang_timeout_s" in told
    assert not (folder / "refused").exists()


@pytest.mark.soak  # the other half of the launch, of a script that builds its model itself
def test_keras_script_is_launched_on_a_ray_cluster(cluster: RayNodes, folder: Path, local: dict[str, Any]) -> None:
    words = launched("launched", "--backend", "tensorflow", "--address", cluster.address)
    run(folder, *words, python=cluster.python, environ=cluster.environ)
    assert_same_bytes(state(folder / "launched"), local)
