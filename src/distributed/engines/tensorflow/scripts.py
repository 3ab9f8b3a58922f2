"""In a process that runs a script: what must come before the script's own use of TensorFlow."""

from __future__ import annotations

import json
import os

import tensorflow as tf

from distributed.core.env import WorkerEnv
from distributed.engines.tensorflow.world.parameter_server import join_cluster
from distributed.engines.tensorflow.world.strategy import Setup, make_strategy, set_threads


def prepare(text: str, world: WorkerEnv) -> None:
    """`text` is JSON, from the launcher. Workers and servers of a parameter server stay in here: a script trains in the
    chief alone."""
    setup = Setup(**json.loads(text), device="cuda" if tf.config.list_physical_devices("GPU") else "cpu")
    if setup.kind == "tpu":
        return
    set_threads(setup, max(1, len(os.sched_getaffinity(0)) // world.local_world_size))
    if setup.kind == "parameter_server":
        join_cluster(world)
    else:
        make_strategy(setup)
