"""Keras models under TensorFlow's strategies: the same numbers as one process, whatever the number of replicas."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distributed.checkpoint.restore.reading import load
from tests.conftest import clean_environ
from tests.template import SOCKET
from tests.warm_scripts import warm_tensorflow

CASES = Path(__file__).with_name("tensorflow_cases.py")
COMMAND = """
import sys
from distributed.cli.main import main
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending
assert "torch" not in sys.modules, "the command imported torch"
"""
EXACT = ("whole", "everything", "batchnorm", "legacy", "scoped")
MANY = ("mirrored", "multi_worker")
CASES_OF_ALL = (*EXACT, "resumed", "bf16", "fp16")
# Which case is trained by which replicas: each by some; by all of them in `make soak`.
TRAINED = {
    "one": (*EXACT, "bf16", "fp16"),
    "mirrored": ("everything", "batchnorm", "scoped", "resumed", "bf16"),
    "multi_worker": (*EXACT, "fp16"),
}


def train(folder: Path, replicas: int, strategy: str, *cases: str) -> Path:
    """All cases in one launch; what each came to is in the folder."""
    folder.mkdir()
    where = ["--script", str(CASES), "--backend", "tensorflow", "--run-dir", str(folder / "run")]
    settings = ["--num-gpus", str(replicas), f"tensorflow_strategy={strategy}", "max_restarts=0"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "train", *where, *settings, "--", str(folder), str(replicas), *cases],
        cwd=folder,
        env=clean_environ(**{SOCKET: warm_tensorflow().socket}),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Worlds:
    """Where each world has written what it came to; all of its cases are trained in one launch."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, world: str, case: str) -> Path:
        is_usual = case in TRAINED[world]
        folder = self._root / (world if is_usual else f"{world}-more")
        if not folder.exists():
            cases = TRAINED[world] if is_usual else [name for name in CASES_OF_ALL if name not in TRAINED[world]]
            replicas, strategy = (1, "auto") if world == "one" else (2, world)
            train(folder, replicas, strategy, *cases)
        return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"))


def each(cases: tuple[str, ...], worlds: tuple[str, ...] = MANY) -> pytest.MarkDecorator:
    pairs = [(case, world) for case in cases for world in worlds]
    rest = {pair for pair in pairs if pair[0] not in TRAINED[pair[1]]}
    params = [pytest.param(*pair, marks=pytest.mark.soak if pair in rest else ()) for pair in pairs]
    return pytest.mark.parametrize(("case", "world"), params)


def weights(folder: Path, case: str) -> list[Any]:
    with np.load(folder / f"{case}.npz") as arrays:
        return [arrays[name] for name in arrays.files]


def history(folder: Path, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{case}.json").read_text())["history"]
    return found


def events(folder: Path, case: str, kind: str) -> list[dict[str, Any]]:
    lines = Path(history(folder, case)["run_dir"], "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses(folder: Path, case: str) -> list[float]:
    return [event["loss"] for event in events(folder, case, "StepEnded")]


@each(EXACT)
def test_two_replicas_match_one_process(case: str, world: str, folder_of: Worlds) -> None:
    one, two = folder_of("one", case), folder_of(world, case)
    assert history(one, case)["steps"] == history(two, case)["steps"] >= 20
    assert history(two, case)["world_size"] == 2
    for alone, shared in zip(weights(one, case), weights(two, case), strict=True):
        np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-5)
    np.testing.assert_allclose(losses(two, case), losses(one, case), rtol=0, atol=1e-5)
    for alone, shared in zip(history(one, case)["epochs"], history(two, case)["epochs"], strict=True):
        assert shared["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
        assert shared["samples"] == alone["samples"]


def test_keras_models_learn(folder_of: Worlds) -> None:
    for case in EXACT:
        first, *_, last = [record["metrics"]["loss"] for record in history(folder_of("one", case), case)["epochs"]]
        assert last < 0.7 * first, case


def test_gradient_norm_is_reported_when_clipping(folder_of: Worlds) -> None:
    for world in MANY:
        folder = folder_of(world, "everything")
        norms = [event["gradient_norm"] for event in events(folder, "everything", "StepEnded")]
        assert max(norms) > 0.5  # that is where they are clipped, after the norm is taken
        assert all(event["gradient_norm"] is None for event in events(folder, "batchnorm", "StepEnded"))


def test_learning_rate_warms_up_and_decays(folder_of: Worlds) -> None:
    folder = folder_of("multi_worker", "everything")
    rates = [event["learning_rate"] for event in events(folder, "everything", "StepEnded")]
    assert rates[:2] == pytest.approx([0.1 * 2 / 3, 0.1])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] < 0.01


@each(("resumed",))
def test_stopped_and_resumed_run_ends_with_same_bytes(case: str, world: str, folder_of: Worlds) -> None:
    folder = folder_of(world, case)
    assert history(folder, "stopped")["steps"] == 11  # in the middle of an epoch of seven
    assert events(folder, "resumed", "RunStarted")[0]["first_step"] == 11
    for whole, resumed in zip(weights(folder, "undisturbed"), weights(folder, "resumed"), strict=True):
        assert whole.tobytes() == resumed.tobytes()
    assert losses(folder, "undisturbed")[11:] == losses(folder, "resumed")
    whole, resumed = (history(folder, case)["epochs"][-1]["metrics"] for case in ("undisturbed", "resumed"))
    assert whole == resumed


@each(("bf16", "fp16"), ("one", *MANY))
def test_mixed_precision_learns_with_parameters_in_fp32(case: str, world: str, folder_of: Worlds) -> None:
    folder = folder_of(world, case)
    found = losses(folder, case)
    assert np.mean(found[-5:]) < 0.7 * np.mean(found[:5])
    assert all(array.dtype == np.float32 for array in weights(folder, case))
    assert found != losses(folder_of("one", "whole"), "whole")
    for alone, shared in zip(weights(folder_of("one", case), case), weights(folder, case), strict=True):
        np.testing.assert_allclose(shared, alone, rtol=0, atol=0.03)


def test_overflowing_loss_scale_is_halved_and_step_skipped(folder_of: Worlds) -> None:
    state = load(history(folder_of("multi_worker", "fp16"), "fp16")["checkpoint"], ranks=()).shared
    assert 0 < float(state["scaler"]["scale"]) < 2.0**20
    assert int(state["optimizer"]["iteration"]) < 28  # steps that overflowed were left out


def test_torch_is_imported_in_no_process(folder_of: Worlds) -> None:
    """In the process of the command neither: it would have said so."""
    for world, cases in TRAINED.items():
        for found in folder_of(world, cases[0]).glob("*.json"):
            assert json.loads(found.read_text())["torch"] is False, found


def test_steps_leave_no_threads_behind(folder_of: Worlds) -> None:
    """A collective with a timeout would keep one until the timeout is over: hundreds in these hundred steps."""
    last = json.loads((folder_of("multi_worker", "fp16") / "fp16.json").read_text())
    assert last["threads"] < 200


def test_events_and_tensorboard_record_the_run(folder_of: Worlds) -> None:
    folder = folder_of("multi_worker", "whole")
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["event"] for line in lines]
    assert kinds[0] == "RunStarted"
    for kind in ("EpochStarted", "StepEnded", "EvaluationEnded", "EpochEnded"):
        assert kinds.count(kind) == (28 if kind == "StepEnded" else 4), kind
    assert {"CheckpointSaved", "RunEnded"} <= set(kinds)
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    shown = next(tag for tag in tags if tag.endswith("loss") and "val" not in tag)
    assert len(accumulator.Scalars(shown)) >= 28, tags


ALONE = """
import json, sys
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
import keras
from distributed import DistributedError, TensorFlowDistributedTrainer
from tensorflow_cases import data

layers = keras.layers


def build(**compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, activation="relu"), layers.Dense(1)])
    if compiled:
        model.compile(**compiled)
    return model


def trainer(model, folder, **more):
    more = {"batch_size": 8, "num_gpus": 2, "epochs": 2, "progress": False, "run_dir": folder} | more
    return TensorFlowDistributedTrainer(model, **more)


def weights(model):
    return [value.tolist() for value in model.get_weights()]


found = {}
adam = {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}
try:  # now, before anything has given TensorFlow a seed
    unseeded = tf.data.Dataset.from_tensor_slices(data(40)).shuffle(40).batch(8).prefetch(1)
    trainer(lambda: build(**adam), "bad", tensorflow_strategy="multi_worker").fit(unseeded)
except DistributedError as error:
    found["unseeded"] = f"{type(error).__name__}: {error}"
given = build(**adam)
datasets = [tf.data.Dataset.from_tensor_slices(data(40)).shuffle(40, seed=3).batch(8) for _ in range(3)]
sent = trainer(given, "sent", batch_size=None, tensorflow_strategy="multi_worker")
sent.fit(datasets[0])
found["sent"] = weights(given)
found["step"] = int(given.optimizer.iterations)

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
with strategy.scope():
    own = build(optimizer=keras.optimizers.Adam(0.01), loss="mse")
here = trainer(own, "here", strategy=strategy, num_gpus=None, batch_size=8)
here.fit(datasets[1])
found["here"] = weights(own)
with strategy.scope():
    drops = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5, name="drop"), layers.Dense(1)])
    drops.compile("sgd", loss="mse")
trainer(drops, "drops", strategy=strategy, num_gpus=None, epochs=1).fit(datasets[1])
state = drops.get_layer("drop").seed_generator.state.value
found["seeds"] = [value.numpy().tolist() for value in state.values]
alone = trainer(lambda: build(optimizer=keras.optimizers.Adam(0.01), loss="mse"), "alone", num_gpus=1, batch_size=16)
alone.fit(datasets[2])
found["alone"] = weights(alone.model)
found["imported torch"] = "torch" in sys.modules


class Own(keras.Model):
    def train_step(self, data):
        return {}


class Layers(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)


import torch

x, y = data(40)
inputs = keras.Input((8,))
own_step = Own(inputs, layers.Dense(1)(inputs))
own_step.compile("adam", loss="mse")
several = {"a": keras.losses.MeanSquaredError(reduction="sum"), "b": "mse"}
twins = keras.Model(inputs, {"a": layers.Dense(1, name="a")(inputs), "b": layers.Dense(1, name="b")(inputs)})
bad = {
    "torch": lambda: trainer(torch.nn.Linear(8, 1), "bad").fit((x, y)),
    "no loss": lambda: trainer(build(), "bad").fit((x, y)),
    "function without loss": lambda: trainer(build, "bad-1", num_gpus=1).fit((x, y)),
    "own step": lambda: trainer(own_step, "bad").fit((x, y)),
    "reductions": lambda: trainer(twins, "bad-2", num_gpus=1, loss=several).fit((x, {"a": y, "b": y})),
    "unbatched": lambda: trainer(given, "bad").fit(tf.data.Dataset.from_tensor_slices((x, y))),
    "lengths": lambda: trainer(given, "bad").fit((x, y[:-1])),
    "loader": lambda: trainer(given, "bad").fit(torch.utils.data.DataLoader([1, 2])),
    "backend": lambda: trainer(given, "bad", backend="fsdp").fit((x, y)),
    "sharding": lambda: trainer(given, "bad", zero_stage=2).fit((x, y)),
    "two rates": lambda: trainer(given, "bad", learning_rate=0.1).fit((x, y)),
    "servers": lambda: trainer(given, "bad", parameter_servers=2).fit((x, y)),
    "ledger": lambda: trainer(given, "bad", sample_ledger=True).fit((x, y)),
    "tpu": lambda: trainer(build, "bad-3", num_gpus=1, loss="mse", tensorflow_strategy="tpu").fit((x, y)),
    "nan": lambda: trainer(given, "nan", num_gpus=1, epochs=1).fit((x, y * np.nan)),
}
from distributed import PyTorchDDPTrainer

bad["keras"] = lambda: PyTorchDDPTrainer(given, run_dir="bad", num_gpus=1).fit([(torch.ones(8), 0)])
bad["keras backend"] = lambda: PyTorchDDPTrainer(torch.nn.Linear(8, 1), backend="tensorflow").fit([(torch.ones(8), 0)])
for name, call in bad.items():
    try:
        call()
        found[name] = "it went through"
    except DistributedError as error:
        found[name] = f"{type(error).__name__}: {error}"
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plain script, which starts its processes itself, and what it is refused."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(CASES, folder)
    done = warm_tensorflow().run_code(folder, ALONE, environ=clean_environ())
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "bad").exists()  # nothing was begun where that could be seen before
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_fit_starts_processes_and_returns_their_weights(alone: dict[str, Any]) -> None:
    """A dataset of the script is sent to them; a strategy of the script trains in it; one replica as well."""
    assert alone["step"] == 6
    for way in ("here", "alone"):
        for mine, theirs in zip(alone[way], alone["sent"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5, err_msg=way)
    assert alone["imported torch"] is False


def test_replicas_have_different_dropout_seeds(alone: dict[str, Any]) -> None:
    (one, drawn), (other, drawn_too) = alone["seeds"]
    assert one != other
    assert drawn == drawn_too == 3  # once a step


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("torch", ("TaskError", "a torch module", "PyTorchDDPTrainer")),
        ("no loss", ("TaskError", "not compiled, and no loss", "pass loss")),
        ("function without loss", ("TaskError", "not compiled, and no loss")),
        ("own step", ("TaskError", "Own has a train_step of its own")),
        ("reductions", ("TaskError", "the loss is reduced by mean and sum")),
        ("unbatched", ("DataError", "single samples", "dataset.batch(")),
        ("unseeded", ("DataError", "train shuffles without a seed", "seed=0")),
        ("lengths", ("DataError", "do not go together", "float32[39, 1]")),
        ("loader", ("DataError", "DataLoader of torch", "(x, y)")),
        ("backend", ("ConfigError", "backend='fsdp'", "backend='tensorflow'")),
        ("sharding", ("PlanError", "zero_stage=2")),
        ("two rates", ("PlanError", "learning_rate is set", "optimizer")),
        ("servers", ("PlanError", "parameter_servers=2", "parameter_server")),
        ("ledger", ("PlanError", "sample_ledger is set, but would have no effect")),
        ("tpu", ("PlanError", "there is no TPU")),
        ("nan", ("NonFiniteLossError", "the loss is nan at step 1")),
        ("keras", ("TaskError", "of Keras", "TensorFlowDistributedTrainer")),
        ("keras backend", ("ConfigError", "backend='tensorflow'", "TensorFlowDistributedTrainer")),
    ],
)
def test_bad_input_is_refused_with_what_to_do(case: str, words: tuple[str, ...], alone: dict[str, Any]) -> None:
    for word in words:
        assert word in alone[case], alone[case]


def test_missing_tensorflow_names_its_extra(tmp_path: Path) -> None:
    code = """
    import sys

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "tensorflow":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Hidden())
    from distributed import TensorFlowDistributedTrainer
    TensorFlowDistributedTrainer(lambda: None, loss="mse").fit(None)
    """
    program = "\n".join(line.removeprefix("    ") for line in code.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=60
    )
    assert "MissingExtraError" in done.stderr
    assert 'pip install "distributed-training[tensorflow]"' in done.stderr
