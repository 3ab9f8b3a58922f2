"""The strategy of a process, made by us or by the user: what would train something else is refused."""

from __future__ import annotations

import json

import pytest

from distributed.core.config import DistributedConfig
from distributed.engines.tensorflow.plan import lay_out
from distributed.launch.ports import free_port
from tests.conftest import clean_environ
from tests.warm_scripts import warm_tensorflow

SCRIPT = """
import json, os, sys

import keras
import numpy as np
import tensorflow as tf

from distributed import TensorFlowDistributedTrainer
from distributed.core.env import WorkerEnv
from distributed.core.errors import DistributedError
from distributed.core.mesh import MeshSpec
from distributed.core.plan import BatchPlan, Plan
from distributed.engines.tensorflow.parameter_server import enter
from distributed.engines.tensorflow.strategy import given_world, make_world, own_gpu

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
said["several workers"] = refusal(lambda: given_world(given))
said["one process"] = given_world(tf.distribute.MirroredStrategy(["CPU:0"])).size

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

# TensorFlow has begun, as in a script that builds its model before fit.
spec = tf.train.ClusterSpec(addresses)
servers = [tf.distribute.Server(spec, job_name=name, task_index=0) for name in ("worker", "ps")]
os.environ["TF_CONFIG"] = json.dumps({"cluster": addresses, "task": {"type": "chief", "index": 0}})
world = enter(plan("parameter_server"), WorkerEnv(world_size=4, launcher="distributed"))
said["workers"] = world.size
said["a server"] = refusal(lambda: given_world(world.strategy))
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
    assert said["one process"] == 1


def test_settings_apply_under_a_user_strategy_or_are_refused(said: dict[str, object]) -> None:
    assert "lr_scaling='linear' with a model that is compiled" in str(said["another rate"])
    assert said["steps"] == 1
    assert said["synchronized"] is True


def test_chief_that_used_tensorflow_before_finds_its_workers(said: dict[str, object]) -> None:
    assert said["workers"] == 2
