"""What a Keras model may bring along, and what of it must come through: losses, layers, metrics, rates, data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import clean_environ
from tests.warm_scripts import warm_tensorflow

SCRIPT = """
import json, sys, threading

import cloudpickle
import keras
import numpy as np
import tensorflow as tf
import tf_keras

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
from distributed import DistributedError, TensorFlowDistributedTrainer
from distributed.core.plan import BatchPlan, Plan
from distributed.engines.tensorflow.model.model import decompose_model
from distributed.engines.tensorflow.input.sources import read_source

found = {}
draws = np.random.default_rng(0)
x = draws.normal(size=(9, 4)).astype("float32")  # of 9, the last batch of 4 leaves one replica of two without a sample
y = x.sum(1, keepdims=True)
images = draws.normal(size=(12, 4, 4, 2)).astype("float32")
unseeded = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(9).batch(4)  # before TensorFlow has a seed
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def model_of(*layers, library=keras, shape=(4,), **compiled):
    model = library.Sequential([library.Input(shape), *layers])
    if compiled:
        model.compile(**compiled)
    return model


def trainer(model, folder, **more):
    return TensorFlowDistributedTrainer(model, **{"progress": False, "epochs": 2, "run_dir": folder} | more)


def weights(model):
    return [np.asarray(value).tolist() for value in model.get_weights()]


def seeded(build):
    keras.utils.set_random_seed(1)  # of TensorFlow, which legacy Keras draws by as well
    return build()


def in_one_and_two(name, build, data, build_one=None):
    alone = trainer(seeded(build_one or build), f"{name}-one", num_gpus=1, batch_size=4)
    alone.fit(data)
    with strategy.scope():
        model = seeded(build)
    trainer(model, f"{name}-two", strategy=strategy, batch_size=2).fit(data)
    found[name] = [weights(alone.model), weights(model)]
    return model


def refusal(name, call):
    try:
        call()
        found[name] = "it went through"
    except DistributedError as error:
        found[name] = f"{type(error).__name__}: {error}"


def mean(y, predicted):
    return tf.reduce_mean((y - predicted) ** 2)


def dense(**more):
    return keras.layers.Dense(1, **more)


sgd = {"optimizer": "sgd"}
model = in_one_and_two("scalar", lambda: model_of(dense(), loss=mean, **sgd), (x, y))
found["patched"] = "_all_reduce_sum_gradients" in vars(model.optimizer)
summed = keras.losses.MeanSquaredError(reduction="sum")
in_one_and_two("sum", lambda: model_of(dense(), loss=summed, optimizer=keras.optimizers.SGD(0.01)), (x, y))


def convolution(fused=None):
    layers = tf_keras.layers
    parts = [layers.Conv2D(3, 2), layers.BatchNormalization(fused=fused), layers.Flatten(), layers.Dense(1)]
    return model_of(*parts, library=tf_keras, shape=(4, 4, 2), loss="mse", optimizer=tf_keras.optimizers.SGD(0.01))


# The fused kernel keeps another moving variance (with Bessel's correction), so one process goes without it too.
targets = images.sum((1, 2, 3))[:, None]
in_one_and_two("convolution", convolution, (images, targets), lambda: convolution(fused=False))


@keras.saving.register_keras_serializable()
class Decoder(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4))

    def call(self, inputs):
        restored = inputs["all"] @ self.kernel
        self.add_loss(tf.reduce_mean((restored - inputs["all"]) ** 2))
        return restored


def decoder():
    inputs = {"all": keras.Input((4,), name="all")}
    model = keras.Model(inputs, Decoder()(inputs))
    model.compile("sgd")
    return model


in_one_and_two("own losses", decoder, tf.data.Dataset.from_tensor_slices({"all": x}).batch(4))


def regularized():
    return model_of(dense(activity_regularizer="l2"), keras.layers.BatchNormalization(), dense(), loss="mse", **sgd)


with strategy.scope():
    model = regularized()
settings = {"strategy": strategy, "batch_size": 2}
refusal("activity", lambda: trainer(model, "activity", **settings).fit((x, y)))
trainer(model, "advised", **settings, sync_batchnorm=False).fit((x, y))


class Focal(keras.losses.Loss):
    def __init__(self, gamma=2.0, **more):
        super().__init__(**more)
        self.gamma = gamma

    def call(self, y, predicted):
        return self.gamma * tf.reduce_mean((y - predicted) ** 2, -1)


class Within(keras.metrics.Mean):
    def __init__(self, limit=1.0, **more):
        super().__init__(**more)
        self.limit = limit


def sent(model):
    parts = cloudpickle.loads(cloudpickle.dumps(decompose_model(model, None)))
    return parts.make(Plan("sent", BatchPlan(4)), (x, y))


for library in (keras, tf_keras):
    name = library.__name__
    normalization = library.layers.Normalization()
    normalization.adapt(x * 3 + 5)
    model = model_of(normalization, library.layers.Dense(1), library=library, loss="mse", **sgd)
    found[f"normalization {name}"] = [np.asarray(one(x)).tolist() for one in (model, sent(model))]
    lookup = library.layers.StringLookup()
    lookup.adapt(np.array(["a", "b"]))
    model = library.Sequential([library.Input((1,), dtype="string"), lookup])
    model.compile("sgd", "mse")
    refusal(f"vocabulary {name}", lambda: decompose_model(model, None))
found["gamma"] = sent(model_of(dense(), loss=Focal(5.0, name="focal"), **sgd)).loss.gamma
refusal("metric", lambda: decompose_model(model_of(dense(), loss="mse", metrics=[Within(3.0)], **sgd), None))

for precision in ("fp32", "bf16"):  # the user's own model is trained; a copy of it is, and brought home
    model = model_of(dense(), loss="mse", optimizer=keras.optimizers.SGD(0.1))
    settings = {"num_gpus": 1, "batch_size": 4, "lr_schedule": "linear", "mixed_precision": precision == "bf16"}
    trainer(model, precision, **settings).fit((x, y))
    found[f"rate {precision}"] = float(model.optimizer.learning_rate)


class Subclassed(keras.Model):
    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    def call(self, x):
        return self.dense(x)


calls = []


def validation():
    calls.append(1)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


given = Subclassed(dense())
given.compile("sgd", "mse")
history = trainer(given, "subclassed", num_gpus=1, epochs=3, checkpoint_frequency=1).fit(unseeded, validation)
found["steps"], found["calls"] = history.steps, len(calls)
found["decisions"] = json.loads(open("subclassed/events.jsonl").readline())["decisions"]


class Gate(tf_keras.layers.Layer):
    def call(self, inputs):
        if tf.reduce_sum(inputs) > 1e9:
            inputs = inputs * 0
        return inputs


def conditional(targets, predicted):
    error = tf.reduce_mean((targets - predicted) ** 2, -1)
    if tf.reduce_sum(error) > 1e9:
        error = error * 0
    return error


def with_conditions():
    layers, sgd = tf_keras.layers, tf_keras.optimizers.SGD(0.01)
    compiled = {"loss": conditional, "metrics": [conditional], "optimizer": sgd}
    return model_of(Gate(), layers.Dense(1), library=tf_keras, **compiled)


in_one_and_two("conditions of tensors", with_conditions, (x, y))
weights_of_samples = np.linspace(0.5, 2, len(x)).astype("float32")
three = (x, y, weights_of_samples)
forms = {"arrays": (x, y), "weighted": three, "dataset": tf.data.Dataset.from_tensor_slices(three).batch(4)}
for form, data in forms.items():
    model = model_of(dense(), loss="mse", metrics=["mae"], **sgd)
    metrics = trainer(model, form, num_gpus=1, epochs=1, batch_size=4).fit((x, y), validation_data=data)
    evaluated = model.evaluate(x, y, sample_weight=None if form == "arrays" else weights_of_samples, verbose=0)
    found[f"evaluated {form}"] = [[metrics.epochs[-1].metrics[name] for name in ("val_loss", "val_mae")], evaluated]
refusal("both validations", lambda: trainer(model, "bad").fit((x, y), (x, y), validation_data=(x, y)))
refusal("two arrays", lambda: trainer(model, "bad").fit(x, y))


def order(made, epoch):
    return np.concatenate(list(made.epoch(epoch).as_numpy_iterator())).tolist()


for name, function in {
    "with epoch": lambda epoch: tf.data.Dataset.range(50).shuffle(50).batch(5),
    "without": lambda: tf.data.Dataset.range(50).shuffle(50).batch(5),
}.items():
    whole, resumed = (read_source(function, "train").made(7) for _ in range(2))
    read = [order(whole, epoch) for epoch in range(3)]
    found[name] = [read, order(resumed, 2)]

from distributed.engines.tensorflow.fitting import Fit

model = model_of(dense(), loss="mse", **sgd)
config = trainer(model, "changed", num_gpus=1, batch_size=4).config
fit = Fit(config, model, {}, strategy=None, train=(x, y), validation=None)
trained = {"model/dense/kernel": np.ones((4, 1))}  # of a model without a bias
refusal("changed", lambda: fit._load_trained_state(fit._plan("changed", None), trained))

wide = model_of(keras.layers.Dense(3000), keras.layers.Dense(3000), dense(), loss="mse", optimizer="sgd")
bad = y.copy()
bad[4:] = np.nan
data = tf.data.Dataset.from_tensor_slices((x, bad)).batch(4)
settings = {"num_gpus": 1, "batch_size": 4, "log_every_n_steps": 1, "checkpoint_frequency": "1 steps"}
refusal("nan", lambda: trainer(wide, "nan", **settings).fit(data))
found["saving"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint-")]
json.dump(found, open("found.json", "w"))
"""

OTHER = """
import keras

from distributed import TensorFlowDistributedTrainer

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
TensorFlowDistributedTrainer(model, num_gpus=1, batch_size=4).fit(lambda: None)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("found")
    done = warm_tensorflow().run_code(folder, SCRIPT, environ=clean_environ())
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return said


@pytest.mark.parametrize("case", ["scalar", "sum", "convolution", "own losses", "conditions of tensors"])
def test_two_replicas_reach_the_weights_of_one(case: str, found: dict[str, Any]) -> None:
    """A loss function that returns one number; a sum; legacy BatchNorm of images; losses that only layers add, of a
    dataset of dicts; legacy code that AutoGraph has to rewrite. The last batch leaves a replica without a sample."""
    one, two = found[case]
    for alone, shared in zip(one, two, strict=True):
        np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["arrays", "weighted", "dataset"])
def test_validation_data_is_evaluated_as_keras_does(form: str, found: dict[str, Any]) -> None:
    ours, by_keras = found[f"evaluated {form}"]
    assert ours == pytest.approx(by_keras, abs=1e-5)


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_adapted_normalization_keeps_its_statistics(library: str, found: dict[str, Any]) -> None:
    here, there = found[f"normalization {library}"]
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-6)


def test_loss_without_config_keeps_its_parameters(found: dict[str, Any]) -> None:
    assert found["gamma"] == 5.0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("vocabulary keras", ("TaskError", "string_lookup", "adapted", "pass a function")),
        ("vocabulary tf_keras", ("TaskError", "string_lookup", "adapted", "pass a function")),
        ("metric", ("TaskError", "Within", "limit", "get_config")),
        ("activity", ("TaskError", "adds a loss of its own", "multi_worker", "sync_batchnorm=False")),
        ("changed", ("TaskError", "dense/bias", "untrained")),
        ("nan", ("NonFiniteLossError", "step 2")),
        ("both validations", ("ConfigError", "validation and validation_data are both given")),
        ("two arrays", ("DataError", "fit((x, y), validation_data=")),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_remedy(
    case: str, words: tuple[str, ...], found: dict[str, Any]
) -> None:
    for word in words:
        assert word in found[case], found[case]


def test_failed_run_leaves_no_partial_checkpoint(found: dict[str, Any]) -> None:
    assert found["saving"] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_optimizer_has_its_own_rate_after_a_schedule(precision: str, found: dict[str, Any]) -> None:
    assert found[f"rate {precision}"] == pytest.approx(0.1)


def test_users_optimizer_is_unpatched_after_the_run(found: dict[str, Any]) -> None:
    assert found["patched"] is False


def test_model_without_config_trains_in_this_process(found: dict[str, Any]) -> None:
    assert found["steps"] == 9


def test_validation_data_function_is_not_called_per_evaluation(found: dict[str, Any]) -> None:
    assert found["calls"] == 2  # to see what it makes, and for the data; there are three evaluations


def test_unseeded_shuffle_is_reported_for_a_resumable_run(found: dict[str, Any]) -> None:
    assert any("reads train in another order" in decision for decision in found["decisions"]), found["decisions"]


@pytest.mark.parametrize("form", ["with epoch", "without"])
def test_resumed_run_reads_function_data_in_the_same_order(form: str, found: dict[str, Any]) -> None:
    read, again = found[form]
    assert again == read[2]
    assert read[0] != read[1]


def test_keras_on_another_backend_is_refused(tmp_path: Path) -> None:
    environ = clean_environ(KERAS_BACKEND="torch")
    command = [sys.executable, "-c", OTHER]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400)
    assert "Keras computes with torch" in done.stderr, done.stderr
    assert "KERAS_BACKEND=tensorflow" in done.stderr
