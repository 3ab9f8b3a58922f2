"""The start benchmark's training with our trainer of Keras models: a script for `distributed train` with one step."""

from __future__ import annotations

import keras
import numpy as np

from distributed import TensorFlowDistributedTrainer

BATCH = 32


def main() -> None:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    inputs, labels = np.zeros((1000, 64), "float32"), np.zeros(1000, "int64")
    trainer = TensorFlowDistributedTrainer(model, batch_size=BATCH, max_steps=1, log_every_n_steps=1, progress=False)
    trainer.fit((inputs, labels))


if __name__ == "__main__":
    main()
