"""A script that trains several small Keras models, one `fit` after the other, and writes down what each came to.

`distributed train --script tensorflow_cases.py … -- <folder> <replicas> <case> …`. A global batch is the same for any
number of replicas, so all worlds must come to the same numbers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distributed import History, TensorFlowDistributedTrainer

REPLICAS = int(sys.argv[2]) if len(sys.argv) > 2 else 1
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def data(samples: int = 100) -> tuple[Any, Any]:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(samples, 8)).astype("float32")
    y = (x[:, :1] * 2 - np.abs(x[:, 1:2]) + 1).astype("float32")
    return x, y


def seeded(library: Any) -> Any:
    library.utils.set_random_seed(1)
    return library


def train(name: str, model: Any, arrays: Any, validation: Any = None, *, batch: int = 16, **settings: Any) -> Any:
    """One fit; its history and the weights that it came to are written down."""
    compiled = {key: settings.pop(key) for key in ("loss", "optimizer", "metrics") if key in settings}
    wanted = {"batch_size": batch // REPLICAS, "log_every_n_steps": 1, "progress": False} | settings
    trainer = TensorFlowDistributedTrainer(model, **compiled, **wanted)
    history = trainer.fit(arrays, validation)
    if trainer.is_main:
        write(name, history, trainer.model)
    return trainer


def write(name: str, history: History, model: Any) -> None:
    np.savez(OUT / f"{name}.npz", *[np.asarray(value) for value in model.get_weights()])
    threads = len(os.listdir("/proc/self/task"))
    found = {"history": history.to_dict(), "torch": "torch" in sys.modules, "threads": threads}
    (OUT / f"{name}.json").write_text(json.dumps(found))


def whole() -> None:
    """A model given whole, as users have it: compiled, with regularization; 100 samples do not divide."""
    import keras

    layers = seeded(keras).layers
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, activation="relu", kernel_regularizer="l2"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    train("whole", model, data(), data(30), epochs=4, tensorboard=True, tensorboard_dir=OUT / "tensorboard")


def everything() -> None:
    """Two inputs, sample weights, accumulation, clipping, a schedule; the last step of an epoch has one sample."""

    def build() -> Any:
        import keras

        seeded(keras)
        left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
        hidden = keras.layers.Concatenate()([keras.layers.Dense(8, activation="tanh")(left), right])
        return keras.Model({"left": left, "right": right}, keras.layers.Dense(1)(hidden))

    x, y = data(49)
    arrays = ({"left": x[:, :4], "right": x[:, 4:]}, y, np.linspace(0.5, 2, 49).astype("float32"))
    settings = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "lr_schedule": "cosine", "warmup_steps": 3}
    settings |= {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "loss": "mse", "metrics": ["mae"]}
    train("everything", build, arrays, batch=8, epochs=6, **settings)


def batchnorm() -> None:
    """BatchNorm, fed by a tf.data.Dataset that shuffles; the last batch has three samples."""
    import keras
    import tensorflow as tf

    layers = seeded(keras).layers
    stack = [keras.Input((8,)), layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dense(1)]
    model = keras.Sequential(stack)
    model.compile(keras.optimizers.SGD(0.05), loss="mse")
    dataset = tf.data.Dataset.from_tensor_slices(data(83)).shuffle(83, seed=5).batch(16)
    train("batchnorm", model, dataset, tf.data.Dataset.from_tensor_slices(data(20)).batch(8), epochs=4)


def legacy() -> None:
    """Keras 2, with everything that is made in another way there."""
    import tf_keras as keras

    layers = seeded(keras).layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, use_bias=False, kernel_regularizer="l2"),  # a bias there would have no gradient
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    settings = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "epochs": 7}
    train("legacy", model, data(60), data(30), batch=8, **settings)


def scoped() -> None:
    """A model built in the scope of a strategy of the script's own, of the kind that the launch has."""
    import keras
    import tensorflow as tf

    is_task = "TF_CONFIG" in os.environ
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if is_task else tf.distribute.MirroredStrategy()
    with strategy.scope():
        layers = seeded(keras).layers
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.02), loss="mse", metrics=["mae"])
    train("scoped", model, data(90), data(20), epochs=4)


def resumed() -> None:
    """Dropout: a run that stops in the middle of an epoch and goes on ends with the bytes of one that does not."""

    def build() -> Any:
        import keras

        layers = seeded(keras).layers
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(32, activation="relu"), layers.Dropout(0.3), layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
        return model

    train("undisturbed", build, data(), epochs=4)
    folder = OUT / "resumed"
    train("stopped", build, data(), epochs=4, max_steps=11, checkpoint_dir=folder)
    train("resumed", build, data(), epochs=4, checkpoint_dir=folder, resume_from_checkpoint=True)


def mixed_model() -> Any:
    import keras

    layers = seeded(keras).layers
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    return model


def bf16() -> None:
    train("bf16", mixed_model, data(), epochs=4, mixed_precision="bf16")


def fp16() -> None:
    """A loss scale that is far too high at first."""
    train("fp16", mixed_model(), data(), epochs=4, mixed_precision="fp16", scaler_init_scale=2.0**20)


CASES: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (whole, everything, batchnorm, legacy, scoped, resumed, bf16, fp16)
}

if __name__ == "__main__":
    for case in sys.argv[3:]:
        CASES[case]()
