"""The start benchmark's training by hand on TensorFlow: MultiWorkerMirroredStrategy and a loop of one step.

Nothing starts such processes for a user, so the script does, and tells each of them the addresses of all.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

BATCH = 32


def start(folder: str, ranks: int) -> int:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    hosts = [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    for server in sockets:
        server.close()
    commands = [[sys.executable, __file__, folder, str(rank), json.dumps(hosts)] for rank in range(ranks)]
    processes = [subprocess.Popen(command) for command in commands]
    return max(process.wait() for process in processes)


def train(folder: str, rank: int, hosts: list[str]) -> None:
    import tensorflow as tf

    cluster = tf.train.ClusterSpec({"worker": hosts})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=rank)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def replica_step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(inputs, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return strategy.run(replica_step, (inputs, labels))

    step(tf.zeros((BATCH, 64)), tf.zeros((BATCH,), tf.int64)).numpy()
    if rank == 0:
        Path(folder, "first-step").write_text(repr(time.time()), encoding="utf-8")


def main() -> None:
    if len(sys.argv) == 3:
        raise SystemExit(start(sys.argv[1], int(sys.argv[2])))
    train(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))


if __name__ == "__main__":
    main()
