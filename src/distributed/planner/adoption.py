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
