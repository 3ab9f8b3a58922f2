"""Part of the data, clipping by value and tries of a Keras model: the steps of a numpy loop, on one replica and two."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from distributed.data.order import shuffled_order
from tests.conftest import clean_environ
from tests.warm_scripts import warm_tensorflow

SCRIPT = """
import json, os

import keras
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
from distributed import DistributedError, TensorFlowDistributedTrainer

draws = np.random.default_rng(0)
x = draws.normal(size=(22, 4)).astype("float32")
y = x.sum(1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
found = {"x": x.tolist()}


def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return model


def fit(name, train, **settings):
    for replicas in (1, 2):
        how = {"progress": False, "epochs": 2, "batch_size": 4 // replicas, "run_dir": f"{name}-{replicas}"}
        if replicas == 1:
            model, how["num_gpus"] = build(), 1
        else:
            with strategy.scope():
                model = build()
            how["strategy"] = strategy
        validation = (x[:10], y[:10]) if train is not data else tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
        trainer = TensorFlowDistributedTrainer(model, **how | settings)
        history = trainer.fit(train, validation)
        found[f"{name} {replicas}"] = [
            model.get_weights()[0][:, 0].tolist(), history.steps, history["val_loss"], history.checkpoint
        ]


fit("limited", (x, y), limit_train_batches=3, limit_val_batches=2)
fit("part", (x, y), limit_train_batches=0.5, limit_val_batches=0.67)
fit("stream", data, limit_train_batches=3, limit_val_batches=2)
fit("overfit", (x, y), overfit_batches=3)
fit("clipped", (x, y), limit_train_batches=3, gradient_clip_value=0.3)
fit("tried", (x, y), fast_dev_run=2, tensorboard=True, checkpoint_dir="kept", checkpoint_frequency=1)
tried = [*os.walk("tried-1"), *os.walk("tried-2")]
found["left"] = [*os.listdir("."), *(name for _, folders, _ in tried for name in folders)]
for name, value in (("detect_anomaly", True), ("bucket_by_length", True), ("model_summary", True)):
    try:
        TensorFlowDistributedTrainer(build(), num_gpus=1, batch_size=4, **{name: value}).fit((x, y))
    except DistributedError as error:
        found[name] = str(error)
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("found")
    done = warm_tensorflow().run_code(folder, SCRIPT, environ=clean_environ())
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return said


def by_hand(x: np.ndarray, case: str) -> tuple[np.ndarray, list[float]]:
    """Two epochs of three steps; the validation losses."""
    y, kernel, losses = x.sum(1), np.zeros(4), []
    validation = {"overfit": x[:12], "stream": x[:6], "clipped": x[:10]}.get(case, x[:8])
    for epoch in range(2):
        is_ordered = case in ("overfit", "stream")
        order = list(range(len(x))) if is_ordered else shuffled_order(len(x), 0, epoch)
        for rows in (order[at : at + 4] for at in range(0, 12, 4)):
            gradient = 2 / 4 * x[rows].T @ (x[rows] @ kernel - y[rows])
            kernel = kernel - 0.1 * (np.clip(gradient, -0.3, 0.3) if case == "clipped" else gradient)
        losses.append(float(np.mean((validation @ kernel - validation.sum(1)) ** 2)))
    return kernel, losses


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("case", ["limited", "part", "stream", "overfit", "clipped"])
def test_keras_run_takes_steps_of_a_hand_written_loop(case: str, replicas: int, found: dict[str, Any]) -> None:
    kernel, steps, losses, _ = found[f"{case} {replicas}"]
    expected, expected_losses = by_hand(np.array(found["x"]), case)
    assert steps == 6
    np.testing.assert_allclose(kernel, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)


def test_keras_fast_dev_run_keeps_nothing(found: dict[str, Any]) -> None:
    for replicas in (1, 2):
        kernel, steps, losses, checkpoint = found[f"tried {replicas}"]
        assert (steps, len(losses), checkpoint) == (2, 1, "")
        assert any(kernel)
    assert not {"kept", "tensorboard", "checkpoints", "passing"} & set(found["left"])


@pytest.mark.parametrize("name", ["detect_anomaly", "bucket_by_length", "model_summary"])
def test_setting_for_torch_is_refused_by_name(name: str, found: dict[str, Any]) -> None:
    assert name in found[name]
