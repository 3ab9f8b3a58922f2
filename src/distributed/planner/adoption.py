"""adopt: the values of an engine's own configuration become settings of this run."""

from __future__ import annotations

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem
from distributed.core.registry import load_target


def adopt(config: DistributedConfig, problems: list[Problem], world_size: int | None = None) -> DistributedConfig:
    """The config with the values of an engine's own configuration, as if they were set here."""
    for engine in ENGINES.entries.values():
        if engine.adopts:
            config = load_target(engine.adopts)(config, problems, world_size)
    return config


def adopt_stages(config: DistributedConfig, stages: int, problems: list[Problem]) -> DistributedConfig:
    """The config with the stages of a model that an engine's own class has cut, which says so itself."""
    if not stages:
        return config
    asked = config.pipeline_parallel
    if config.given("pipeline_parallel") and asked != stages:
        what = f"pipeline_parallel={asked} ({config.source('pipeline_parallel')}), but the model has {stages} stages"
        problems.append(Problem(what, why="the model is cut already", do="leave pipeline_parallel out"))
    return config.merged({"pipeline_parallel": stages}, "the model")
