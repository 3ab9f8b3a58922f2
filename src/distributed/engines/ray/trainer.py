"""RayTrainer: the Trainer on ranks that Ray places, in a script or inside a trial of Ray Tune."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn

from distributed.core.config import DistributedConfig
from distributed.core.plan import Decision
from distributed.core.registry import load_target
from distributed.core.run_dir import RunDir
from distributed.engines.ray.names import FOLDER
from distributed.train.task import Task
from distributed.trainers.options import TrainerOptions
from distributed.trainers.trainer import Trainer

_OF_KERAS = "distributed.engines.tensorflow.trainer:TensorFlowDistributedTrainer"
_MISTYPED = 0.85  # how alike a name must be to a setting's to be one that was mistyped


class RayTrainer(Trainer):
    """Trains on a Ray cluster: the one at `address`, or one on this machine for this run.

    `config` may be the parameters of a search, in which settings stand beside the model's own: `lr` is
    `learning_rate`, and what is no setting is left to the model, which the plan says. Of a Keras model this makes a
    `TensorFlowDistributedTrainer`, with its arguments.

    >>> trainer = RayTrainer(nn.Linear(4, 2), {"hidden_size": 64, "lr": 0.01, "batch_size": 32}, num_gpus=2)
    >>> trainer.config.backend, trainer.config.learning_rate, trainer.config.batch_size
    ('ray', 0.01, 32)
    """

    preset: Mapping[str, Any] = {"backend": "ray"}

    def __new__(cls, model: Any = None, config: Any = None, *more: Any, **how: Any) -> Any:
        """A Keras model has a trainer of its own, whose ranks Ray places as well."""
        if cls is not RayTrainer or not _is_keras(model):
            return super().__new__(cls)
        settings = how if config is None or isinstance(config, DistributedConfig) else _settings_of(config)[0] | how
        given = config if isinstance(config, DistributedConfig) else None
        return load_target(_OF_KERAS)(model, given, **dict(cls.preset) | settings)

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Task,
        config: DistributedConfig | Mapping[str, Any] | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        if config is not None and not isinstance(config, DistributedConfig):
            config, others = _settings_of(config)
            if others:
                reason = "they are no settings, so they are taken for the model's own parameters"
                self.notes = (Decision(f"{', '.join(others)} not used", reason),)
        super().__init__(model, config, **options)

    @property
    def result(self) -> Any:
        """Ray's own `Result` of the last `fit` that started ranks: our metrics, and our checkpoint, where it lies."""
        from ray.train import Result

        if self.history is None:
            return None
        folder = RunDir(self.history.run_dir).engine_folder(FOLDER)
        snapshots = folder.glob("launch-*/checkpoint_manager_snapshot.json")
        newest = max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
        return None if newest is None else Result.from_path(str(newest.parent.absolute()))


# What help() and editors show of the class; they would show that of __new__.
RayTrainer.__new__.__signature__ = inspect.signature(RayTrainer.__init__)  # type: ignore[attr-defined]


def _is_keras(model: Any) -> bool:
    return any(kind.__module__.partition(".")[0] in ("keras", "tf_keras") for kind in type(model).__mro__)


def _settings_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings among a search's parameters, and the names of the others.

    A name that is nearly a setting's stays with them, where it is refused.
    """
    known = DistributedConfig.model_fields
    settings: dict[str, Any] = {}
    others: list[str] = []
    for name, value in config.items():
        if name == "lr" and "learning_rate" not in config:
            settings["learning_rate"] = value
        elif name in known or difflib.get_close_matches(name, known, n=1, cutoff=_MISTYPED):
            settings[name] = value
        else:
            others.append(name)
    return settings, others
