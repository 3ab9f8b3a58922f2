"""The settings of a `fit`: those of its trainer, its call, its trial and its launch, later ones winning."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

from distributed.core.config import DistributedConfig, build_config
from distributed.core.engines.engine import ENGINES
from distributed.core.env import overrides_in_env
from distributed.core.errors import ConfigError
from distributed.observe.trial import current_trial, report_read, trial_settings

_FITS = itertools.count(1)  # of this process: each in a trial of a search has its own folder


def build_fit_config(
    config: DistributedConfig, settings: Mapping[str, Any], models: str = "torch"
) -> DistributedConfig:
    """A trainer's settings, and over them those of its `fit`, of the trial and of the launch.

    `models` says whose models the trainer has: "torch" or "keras".
    """
    merged = with_launch_settings(_in_trial(config.merged(plain(settings), "fit(…)")))
    _check_backend(merged, models)
    return merged


def _check_backend(config: DistributedConfig, models: str) -> None:
    """A backend that trains models of another framework would only fail later, and less clearly."""
    name = config.backend
    able = {other for other, engine in ENGINES.entries.items() if models in (engine.models, *engine.places)}
    if name == "auto" or name in able:
        return
    own = sorted(able, key=lambda other: (ENGINES.entries[other].models != models, other))
    trainer = "TensorFlowDistributedTrainer" if models == "torch" else "Trainer"
    raise ConfigError(
        f"backend={name!r} ({config.source('backend')}) does not train {models.capitalize()} models",
        why=f"{name} trains {ENGINES.entries[name].models.capitalize()} models, for which there is {trainer}",
        do=f"set backend={' or '.join(repr(other) for other in own)}, or leave it out",
    )


def _in_trial(config: DistributedConfig) -> DistributedConfig:
    """In a trial of a search, run directory and checkpoint are the trial's."""
    trial = current_trial()
    if trial is None:
        return config
    defaults, always = trial_settings(trial, next(_FITS))
    report_read(json.loads(overrides_in_env() or "{}"))
    given, sources = config.given_values(), {name: config.source(name) for name in config.given_values()}
    source = f"trial {trial.id}"
    return build_config([(defaults, source, {}), (given, "", sources), (always, source, {})])


def with_launch_settings(config: DistributedConfig) -> DistributedConfig:
    """What was given on the command line that launched this rank wins over the script."""
    given = json.loads(overrides_in_env() or "{}")
    sources = {name: config.source(name) for name in config.given_values()}
    values = {name: value for name, (value, _) in given.items() if value is not None}
    finer = {name: source for name, (_, source) in given.items()}
    return build_config([(config.given_values(), "", sources), (values, "", finer)])


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Paths as text."""
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}


def values_of(config: DistributedConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of a trainer's second argument."""
    if isinstance(config, DistributedConfig):
        return config.given_values()
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    raise ConfigError(
        f"config is a {type(config).__name__}",
        why="the second argument of a trainer holds its settings; other parts have names, and data belongs to fit",
        do="Trainer(model, loss_fn=…, optimizer=…).fit(train_loader, val_loader)",
    )
