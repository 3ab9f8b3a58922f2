"""The strategy of a process, made by us or by the user: what would train something else is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from distributed.core.config import DistributedConfig
from distributed.engines.tensorflow.plan import lay_out
from distributed.launch.ports import free_port
from tests.conftest import clean_environ
from tests.warm_scripts import warm_tensorflow

SCRIPT = """
import contextlib, json, os, sys

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from distributed import DistributedConfig, TensorFlowDistributedTrainer
from distributed.core.env import WorkerEnv
from distributed.core.errors import DistributedError
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, Plan
from distributed.engines.tensorflow.world.parameter_server import enter
from distributed.engines.tensorflow.world.strategy import make_world, own_gpu
from distributed.engines.tensorflow.world.user_strategy import checked_strategy

engines, addresses = json.loads(sys.argv[1])


def plan(strategy):
    return Plan("run", BatchPlan(1), mesh=MeshSpec(dp_replicate=2), engine=engines[strategy])


def refusal(call):
    try:
        call()
    except DistributedError as error:
        return str(error)
    return ""


cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
said = {"fewer replicas": refusal(lambda: make_world(plan("multi_worker"), WorkerEnv()))}
said["own"] = [own_gpu(["GPU:0", "GPU:1"], 1), own_gpu(["GPU:0"], 1), own_gpu(["GPU:0", "GPU:1"], 2)]
given = tf.distribute.MultiWorkerMirroredStrategy()
config = DistributedConfig(backend="tensorflow")
said["several workers"] = refusal(lambda: checked_strategy(given, config))
single = tf.distribute.MirroredStrategy(["CPU:0"])
said["one process"] = checked_strategy(single, config) is single

mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
with mirrored.scope():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
settings = {"strategy": mirrored, "batch_size": 2, "max_steps": 1, "progress": False}
data = (np.ones((8, 2), "float32"), np.ones((8, 1), "float32"))
scaled = TensorFlowDistributedTrainer(model, lr_scaling="linear", run_dir="scaled", **settings)
said["another rate"] = refusal(lambda: scaled.fit(data))
said["steps"] = TensorFlowDistributedTrainer(model, run_dir="given", **settings).fit(data).steps
said["synchronized"] = model.layers[0].synchronized
said["devices"] = refusal(lambda: TensorFlowDistributedTrainer(model, strategy=mirrored, num_gpus=4).fit(data))
said["strategies"] = refusal(
    lambda: TensorFlowDistributedTrainer(model, strategy=mirrored, tensorflow_strategy="multi_worker").fit(data)
)
with single.scope():
    said["inside"] = refusal(lambda: TensorFlowDistributedTrainer(model).fit(data))


def seeded(scope=None, library=keras):
    library.utils.set_random_seed(1)
    with scope.scope() if scope else contextlib.nullcontext():
        layers = [library.layers.Input((2,)), library.layers.Dense(2, activation="tanh"), library.layers.Dense(1)]
        return library.Sequential(layers)


def compiled(model, library=keras):
    model.compile(library.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def in_scope(scope, library=keras):
    model = seeded(scope, library)
    with scope.scope():
        return compiled(model, library)


def trained(model, **more):
    # One and two replicas have the same global batch; the second fit continues with what the first has trained.
    global fits
    fits += 1
    trainer = TensorFlowDistributedTrainer(model, epochs=1, progress=False, **{"batch_size": 4} | more)
    for again in (0, 1):
        trainer.fit(samples, run_dir=f"fit-{fits}-{again}")
    return [np.asarray(value).tolist() for value in trainer.model.get_weights()]


fits = 0
x = np.random.default_rng(0).normal(size=(20, 2)).astype("float32")
samples = (x, x[:, :1] * 2)
said["trained"] = {
    "no scope": trained(compiled(seeded()), num_gpus=1),
    "scope of two": trained(in_scope(mirrored), batch_size=2),
    "scope of two, legacy": trained(in_scope(mirrored, tf_keras), batch_size=2, num_gpus=2),
    "scope of one": trained(in_scope(single)),
    "one replica of a scope of two": trained(in_scope(mirrored), num_gpus=1),
    "compiled outside": trained(compiled(seeded(mirrored)), batch_size=2),
    "another scope": trained(in_scope(single), strategy=mirrored, batch_size=2),
    "no scope, in a strategy": trained(compiled(seeded()), strategy=mirrored, batch_size=2),
}
said["told"] = {
    how: json.loads(open(f"fit-{number}-0/events.jsonl").readline())["decisions"]
    for number, how in enumerate(said["trained"], 1)
}
after = in_scope(mirrored)
TensorFlowDistributedTrainer(after, run_dir="after", **settings).fit(samples)
said["keras"] = after.fit(*samples, verbose=0).history["loss"]
building = {"num_gpus": 1, "batch_size": 2, "run_dir": "building"}
said["function"] = refusal(lambda: TensorFlowDistributedTrainer(lambda: in_scope(single), **building).fit(samples))

# TensorFlow has begun, as in a script that builds its model before fit.
spec = tf.train.ClusterSpec(addresses)
servers = [tf.distribute.Server(spec, job_name=name, task_index=0) for name in ("worker", "ps")]
os.environ["TF_CONFIG"] = json.dumps({"cluster": addresses, "task": {"type": "chief", "index": 0}})
world = enter(plan("parameter_server"), WorkerEnv(world_size=4, launcher="distributed"))
said["workers"] = world.size
said["a server"] = refusal(lambda: checked_strategy(world.strategy, config))
print(json.dumps(said), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """By one process that has made several strategies."""
    place = tmp_path_factory.mktemp("world")
    engines = {}
    for strategy in ("multi_worker", "parameter_server"):
        layout = lay_out(DistributedConfig(backend="tensorflow", tensorflow_strategy=strategy), 1, 2)
        engines[strategy] = {**vars(layout), "tasks": layout.tasks, "communication": "auto"}
    addresses = {name: [f"127.0.0.1:{free_port()}"] for name in ("chief", "worker", "ps")}
    environ = clean_environ(CUDA_VISIBLE_DEVICES="")
    done = warm_tensorflow().run_code(place, SCRIPT, json.dumps([engines, addresses]), environ=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_world_size_unlike_the_plan_is_refused(said: dict[str, str]) -> None:
    assert "2 replicas were planned, but TensorFlow has 1" in said["fewer replicas"]


def test_process_that_sees_all_gpus_uses_that_of_its_local_rank(said: dict[str, object]) -> None:
    assert said["own"] == [["GPU:1"], ["GPU:0"], []]


def test_user_strategy_over_several_processes_is_refused(said: dict[str, str]) -> None:
    assert "tensorflow_strategy='multi_worker'" in said["several workers"]
    assert "tensorflow_strategy='parameter_server'" in said["a server"]
    assert said["one process"] is True


def test_settings_apply_under_a_user_strategy_or_are_refused(said: dict[str, object]) -> None:
    assert "lr_scaling='linear' with a model that is compiled" in str(said["another rate"])
    assert said["steps"] == 1
    assert said["synchronized"] is True


def test_model_of_a_scope_trains_as_one_of_none(said: dict[str, dict[str, object]]) -> None:
    """In place, or as a copy where the settings or the strategy are others; a second fit continues it."""
    trained = said["trained"]
    for how, weights in trained.items():
        for mine, alone in zip(weights, trained["no scope"], strict=True):
            np.testing.assert_allclose(mine, alone, rtol=0, atol=1e-5, err_msg=how)


def test_place_of_a_scoped_model_is_a_decision(said: dict[str, dict[str, list[str]]]) -> None:
    for how, told in (("scope of two", "trains in this process"), ("one replica of a scope of two", "a copy of the")):
        assert any(told in decision for decision in said["told"][how]), said["told"][how]
    assert not any("model" in decision for decision in said["told"]["no scope"])


def test_model_of_a_scope_is_keras_own_after_fit(said: dict[str, list[float]]) -> None:
    assert len(said["keras"]) == 1
    assert np.isfinite(said["keras"][0])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("devices", ("strategy= has 2 replicas", "4 devices", "num_gpus")),
        ("strategies", ("tensorflow_strategy='multi_worker' with strategy=",)),
        ("inside", ("fit is called in the scope of a MirroredStrategy",)),
        ("function", ("enters the scope of a strategy of its own",)),
    ],
)
def test_scope_that_cannot_train_is_refused(case: str, words: tuple[str, ...], said: dict[str, str]) -> None:
    for word in words:
        assert word in said[case]


def test_chief_that_used_tensorflow_before_finds_its_workers(said: dict[str, object]) -> None:
    assert said["workers"] == 2
