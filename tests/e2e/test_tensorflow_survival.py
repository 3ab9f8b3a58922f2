"""TensorFlow runs that lose processes: what is killed comes back, and what was trained is what would have been."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.checkpoint.restore.reading import load
from distributed.checkpoint.storage.manifests import open_checkpoint, read_manifest
from tests.conftest import clean_environ
from tests.template import SOCKET
from tests.warm_scripts import Script, warm_tensorflow

STEPS, WORKERS = 192, 2
PATIENCE_S = 240  # for a whole run on a machine that others use too

SCRIPT = """
import json, os, sys
import numpy as np
from distributed import TensorFlowDistributedTrainer


def build():
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dropout(0.1, seed=3),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)

if __name__ == "__main__":
    settings = {"num_gpus": 2, "batch_size": 8, "epochs": 12, "log_every_n_steps": 4, "keep_last": 2}
    trainer = TensorFlowDistributedTrainer(
        build, settings, checkpoint_frequency="4 steps", progress=False, **json.loads(sys.argv[1])
    )
    history = trainer.fit((x, y))
    print("steps", history.steps, "torch", "torch" in sys.modules)
"""

PLAIN = """
import json, os, sys
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    number = tf.Variable(2.0)


def of_replica():
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, number * 1.0)


total = strategy.experimental_local_results(tf.function(strategy.run)(of_replica))[0]
task = json.loads(os.environ["TF_CONFIG"])["task"]
print("total", float(total), "task", task["type"], task["index"], "torch", "torch" in sys.modules)
"""

WHOLE = """
import keras
import numpy as np
from distributed import TensorFlowDistributedTrainer

model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
before = float(np.mean((model.predict(x, verbose=0) - y) ** 2))
trainer = TensorFlowDistributedTrainer(model, batch_size=8, progress=False)
steps = [trainer.fit((x, y)).steps for _ in range(2)]
after = float(np.mean((model.predict(x, verbose=0) - y) ** 2))
print("steps", steps, "better", after < before)
"""


ENVIRON = clean_environ(CUDA_VISIBLE_DEVICES="")


class Job:
    """A run in a folder of its own, started by the command line or by `fit`."""

    def __init__(self, run: Path, process: subprocess.Popen[str] | Script) -> None:
        self.run, self._process = run, process

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [found for found in map(json.loads, lines) if found["event"] == kind]

    def until(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise AssertionError(self._process.communicate()[0])
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(event["step"] >= step for event in self.events("StepEnded")))

    def pid(self, rank: int) -> int | None:
        """Of the process that has this rank's heartbeat in its memory."""
        mapped = re.compile(rf"{re.escape(str(self.run))}/attempts/\d+/heartbeat-{rank}$", re.MULTILINE)
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and mapped.search(Path("/proc", name, "maps").read_text()):
                    return int(name)
            except OSError:  # it has ended, or is not ours
                continue
        return None

    def kill(self, rank: int) -> None:
        pid = self.pid(rank)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> tuple[int, str]:
        out, err = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode or 0, out + (err or "")

    def digests(self) -> dict[str, str]:
        """Of what training made, at the end."""
        manifest = read_manifest(*open_checkpoint(str(self.run / "checkpoints" / f"step-{STEPS:06d}")))
        return {name: digest for name, digest in manifest.digests.items() if name in ("model", "optimizer")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("survival")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "plain.py").write_text(PLAIN)
    (folder / "whole.py").write_text(WHOLE)
    return folder


def by_command(folder: Path, name: str, *more: str, script: str = "train.py", settings: str = "{}") -> Job:
    options = ["--script", script, "--backend", "tensorflow", "--num-gpus", str(WORKERS), "--run-dir", name]
    command = [sys.executable, "-m", "distributed.cli", "train", *options, "progress=false", *more]
    environ = ENVIRON | {SOCKET: warm_tensorflow().socket}
    command += ["--", settings]
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Job(folder / name, process)


def by_fit(folder: Path, name: str, **settings: Any) -> Job:
    told = json.dumps({"run_dir": str(folder / name), **settings})
    return Job(folder / name, warm_tensorflow().start_code(folder, SCRIPT, told, environ=ENVIRON))


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, str]:
    job = by_command(folder, "undisturbed", "tensorflow_strategy=multi_worker")
    code, out = job.ended()
    assert code == 0, out
    assert f"steps {STEPS} torch False" in out
    return job.digests()


def test_plain_script_gets_tf_config_without_torch(folder: Path) -> None:
    code, out = by_command(folder, "plain", "tensorflow_strategy=multi_worker", script="plain.py").ended()
    assert code == 0, out
    assert "[r0] total 4.0 task worker 0 torch False" in out
    assert "[r1] total 4.0 task worker 1 torch False" in out


def test_killed_worker_of_fit_restarts_with_same_bytes(folder: Path, undisturbed: dict[str, str]) -> None:
    """In a run of the command that was stopped in the middle of an epoch, and that `fit` goes on with."""
    job = by_command(folder, "disturbed", "tensorflow_strategy=multi_worker")
    job.until_step(20)
    job.stop()
    code, out = job.ended()
    assert code not in (0, 1), out
    stopped_at = job.events("RunEnded")[-1]["step"]
    assert 20 <= stopped_at < STEPS
    job = by_fit(folder, "disturbed", tensorflow_strategy="multi_worker", resume_from_checkpoint=True)
    job.until_step(stopped_at + 20)
    assert job.events("RunStarted")[-1]["first_step"] == stopped_at
    job.kill(rank=1)
    code, out = job.ended()
    assert code == 0, out
    (recovered,) = job.events("Recovered")
    assert "step-" in recovered["source"]
    assert recovered["step"] >= stopped_at + 16
    assert job.digests() == undisturbed


def test_prebuilt_model_trains_with_a_parameter_server(folder: Path) -> None:
    code, out = by_command(folder, "whole", "tensorflow_strategy=parameter_server", script="whole.py").ended()
    assert code == 0, out
    assert "[r0] steps [4, 4] better True" in out


def test_killed_worker_costs_no_step_killed_server_a_checkpoint(folder: Path) -> None:
    steps = 2 * STEPS  # the others train on while a worker comes back, and must not be done before a server is killed
    settings = {"tensorflow_strategy": "parameter_server", "max_restarts": 5, "epochs": 24}
    job = by_fit(folder, "served", **settings)
    chief, worker, server = 0, 1, 1 + WORKERS
    job.until_step(20)
    before = {rank: job.pid(rank) for rank in range(2 + WORKERS)}
    job.kill(worker)
    job.until(lambda: job.events("Recovered") and job.pid(worker) not in (None, before[worker]))
    after = {rank: job.pid(rank) for rank in range(2 + WORKERS)}
    assert {rank for rank in before if after[rank] != before[rank]} == {worker}
    assert job.events("Recovered")[0]["source"] == f"memory of rank {chief}"
    assert job.events("Recovered")[0]["lost_steps"] == 0
    job.until_step(80)
    job.kill(server)
    code, out = job.ended()
    assert code == 0, out
    assert f"steps {steps} torch False" in out
    assert "step-" in job.events("Recovered")[1]["source"]
    assert len(job.events("RunStarted")) == 2, "the first world went on without its worker"
    losses = [event["loss"] for event in job.events("StepEnded")]
    assert losses[-1] < losses[0] / 10
    trained = load(str(job.run / "checkpoints" / f"step-{steps:06d}")).shared
    assert trained["optimizer"]["iteration"].item() >= steps * WORKERS, "every batch of every step was an update"
