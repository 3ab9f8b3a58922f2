"""TensorFlowDistributedTrainer: Keras models under TensorFlow's own strategies, with the settings of every Trainer."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping
from typing import Any, Unpack

from distributed.core.config import DistributedConfig, build_config
from distributed.core.engines.engine import ENGINES
from distributed.core.env import dry_ranks, take_out, worker_env
from distributed.core.errors import ConfigError, DataError, PlanError, TaskError
from distributed.core.history import History
from distributed.core.registry import is_installed
from distributed.core.settings.typed import Settings, TrainerSettings
from distributed.engines.tensorflow.world.cluster import STRATEGY
from distributed.trainers.dev_run import without_checkpoint
from distributed.trainers.settings import build_fit_config, plain

_JOINED = itertools.count(1)  # fits of this process in a launcher's world; each after the first has its own folder
_OF_SETTINGS = ("adamw", "adam", "sgd")


class TensorFlowDistributedTrainer:
    """Trains a Keras model, of Keras 3 or legacy, on many devices.

    The model is given whole or as a function that builds it, compiled or with a `loss`. Settings are those of
    `DistributedConfig`, as keywords, in `config`, or both (keywords win). In a plain script, a notebook or a REPL,
    `fit` starts the processes itself; in one that a launcher started it joins that world.

        model = keras.Sequential([keras.layers.Dense(512, activation="relu"), keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        trainer = TensorFlowDistributedTrainer(model, num_gpus=4, batch_size=32, epochs=50)
        history = trainer.fit((x, y), validation=(x_val, y_val))
    """

    preset: Mapping[str, Any] = {"backend": "tensorflow"}

    def __init__(
        self,
        model: Any,
        config: DistributedConfig | Mapping[str, Any] | None = None,
        *,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        strategy: Any = None,
        callbacks: Any = (),
        **settings: Unpack[TrainerSettings],
    ) -> None:
        """`strategy` is a tf.distribute.Strategy in whose scope the model was built: then all happens in this process.

        `optimizer`, `loss` and `metrics` are those of Keras's `compile`; an optimizer may be a function that makes it.
        """
        if callbacks:
            kinds = ", ".join(type(callback).__name__ for callback in callbacks)
            raise TaskError(
                f"TensorFlowDistributedTrainer takes no callbacks, and {kinds} would never be called",
                why="the loop for Keras models has no points at which it calls code of yours, nor does it call Keras's",
                do="keep_best, checkpoint_frequency and log_every_n_steps do much of it; or call fit epoch by epoch",
            )
        keywords = plain(settings)
        if isinstance(optimizer, str) and optimizer in _OF_SETTINGS:
            keywords["optimizer"], optimizer = optimizer, None
        given = config.given_values() if isinstance(config, DistributedConfig) else dict(config or {})
        preset = {name: value for name, value in self.preset.items() if name not in keywords and name not in given}
        self.config = build_config(
            [(preset, type(self).__name__, {}), (given, "config", {}), (keywords, "argument", {})]
        )
        self._given, self._strategy = model, strategy
        self._compiled = {"optimizer": optimizer, "loss": loss, "metrics": metrics}
        self._trained: Any = None  # by the last fit
        self.history: History | None = None

    @property
    def model(self) -> Any:
        """The model, which holds the trained weights after `fit`; one that a function builds is there only then."""
        is_function = callable(self._given) and not hasattr(self._given, "compile")
        return self._trained if is_function else self._given

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that should print: the first, or a script that started them itself."""
        world = worker_env()
        return world is None or world.is_main

    @property
    def best_accuracy(self) -> float:
        """Of the last `fit`."""
        return float("nan") if self.history is None else self.history.best_accuracy

    def fit(
        self, train: Any, validation: Any = None, *, validation_data: Any = None, **settings: Unpack[Settings]
    ) -> History:
        """Train, and afterwards hold the trained weights in `model`.

        `train` and `validation` are `(x, y)` or `(x, y, sample_weight)` of arrays, a tf.data.Dataset of batches, or a
        function that returns one; `validation_data` is Keras's name for `validation`. `settings` win over the
        trainer's. Ctrl-C ends all processes at a common step; `model` and `history` then hold what was trained, and
        KeyboardInterrupt is raised.
        """
        validation = _one_validation(train, validation, validation_data)
        config = build_fit_config(self.config, settings, "keras")
        if config.backend == "auto":
            config = config.merged(self.preset, type(self).__name__)
        ENGINES.require("tensorflow")
        if dry_ranks() is not None:
            raise PlanError(
                "backend='tensorflow' has no dry run of several ranks",
                why="a dry run of several ranks runs a torch model without memory",
                do="leave out =N: --dry-run shows the commands and environments",
            )
        from distributed.engines.tensorflow.fitting import Fit  # imports TensorFlow, which takes seconds

        fit = Fit(config, self._given, self._compiled, strategy=self._strategy, train=train, validation=validation)
        world = worker_env()
        self.history = fit.alone() if world is None else fit.in_world(world, next(_JOINED))
        self._trained = fit.model
        if config.fast_dev_run:
            self.history = without_checkpoint(self.history, is_main=self.is_main)
        if self.history.interrupted:
            if world is not None and not world.is_followed and self.history.stop_signal != signal.SIGINT:
                raise SystemExit(config.requeue_exit_code)  # for Slurm, which started this process itself
            raise KeyboardInterrupt
        return self.history


def _one_validation(train: Any, validation: Any, validation_data: Any) -> Any:
    if validation is not None and validation_data is not None:
        raise ConfigError(
            "validation and validation_data are both given",
            why="both are the data that is evaluated after each epoch",
            do="leave one of them out",
        )
    if hasattr(train, "shape") and hasattr(validation, "shape"):  # as Keras's fit has them
        raise DataError(
            "fit(x, y) has inputs for train, and targets for validation",
            why="inputs and their targets are one argument here",
            do="fit((x, y), validation_data=(x_val, y_val))",
        )
    return validation if validation_data is None else validation_data


def _prepare() -> None:
    """Where a script is run in several processes, TensorFlow must know the others before the script builds its
    first model, which it does before it has a trainer: so it is done when the script imports one."""
    layout, world = take_out(STRATEGY), worker_env()
    if layout and world is not None and is_installed("tensorflow"):
        from distributed.engines.tensorflow.scripts import prepare

        prepare(layout, world)


_prepare()
