"""RayTrainer: the Trainer on ranks that Ray places, in a script or inside a trial of Ray Tune."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import nn

from distributed.core.config import DistributedConfig
from distributed.core.plan import Decision
from distributed.core.run_dir import RunDir
from distributed.core.settings.typed import TrainerSettings
from distributed.engines.ray.names import FOLDER
from distributed.trainers.trainer import Trainer

_MISTYPED = 0.85  # how alike a name must be to a setting's to be one that was mistyped


class RayTrainer(Trainer):
    """Trains on a Ray cluster: the one at `address`, or one on this machine for this run.

    `config` may be the parameters of a search, in which settings stand beside the model's own: `lr` is
    `learning_rate`, and what is no setting is left to the model, which the plan says.

    >>> trainer = RayTrainer(nn.Linear(4, 2), {"hidden_size": 64, "lr": 0.01, "batch_size": 32}, num_gpus=2)
    >>> trainer.config.backend, trainer.config.learning_rate, trainer.config.batch_size
    ('ray', 0.01, 32)
    """

    preset: Mapping[str, Any] = {"backend": "ray"}

    def __init__(
        self,
        model: nn.Module,
        config: DistributedConfig | Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None = None,
        scheduler: Any = None,
        metrics: Mapping[str, Callable[[Any, Any], torch.Tensor]] | None = None,
        **settings: Unpack[TrainerSettings],
    ) -> None:
        if config is not None and not isinstance(config, DistributedConfig):
            config, others = _settings_of(config)
            if others:
                reason = "they are no settings, so they are taken for the model's own parameters"
                self.notes = (Decision(f"{', '.join(others)} not used", reason),)
        super().__init__(
            model, config, optimizer=optimizer, loss_fn=loss_fn, scheduler=scheduler, metrics=metrics, **settings
        )

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
