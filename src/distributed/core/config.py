"""DistributedConfig: what the user asked for. Values are checked here; whether they can run is the planner's word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Unpack, cast

from pydantic import PrivateAttr, ValidationError

from distributed.core.errors import ConfigError, Problem
from distributed.core.registry import nearest_hint
from distributed.core.settings.checks import contradictions
from distributed.core.settings.run import (
    BackendSettings,
    CheckpointSettings,
    DataSettings,
    MonitoringSettings,
    ResourceSettings,
    SurvivalSettings,
    TrainingSettings,
)
from distributed.core.settings.step import (
    CommunicationSettings,
    MemorySettings,
    OptimizationSettings,
    ParallelismSettings,
    SpeedSettings,
)
from distributed.core.settings.typed import Settings

Sources = dict[str, str]


class DistributedConfig(  # pydantic takes the fields of the last base first
    MonitoringSettings,
    CheckpointSettings,
    DataSettings,
    SurvivalSettings,
    CommunicationSettings,
    OptimizationSettings,
    SpeedSettings,
    MemorySettings,
    ParallelismSettings,
    TrainingSettings,
    BackendSettings,
    ResourceSettings,
):
    """All settings of a run, checked together; every wrong one is reported at once.

    >>> config = DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=4, batch_size=32)
    >>> config.epochs, config.source("batch_size"), config.source("epochs")
    (1, 'argument', 'default')
    """

    _sources: Sources = PrivateAttr(default_factory=dict)

    def __init__(self, _sources: Mapping[str, str] | None = None, **settings: Unpack[Settings]) -> None:
        values = cast(dict[str, Any], settings)
        problems: list[Problem] = []
        try:
            super().__init__(**values)
            sound = self
        except ValidationError as invalid:
            problems += _problems(invalid, _sources or {})
            wrong = {str(error["loc"][0]) for error in invalid.errors()}
            sound = type(self).model_construct(**{name: v for name, v in values.items() if name not in wrong})
        problems += contradictions(sound)
        if problems:
            raise ConfigError(problems)
        given = dict.fromkeys(values, "argument") if _sources is None else _sources
        self._sources = {name: source for name, source in given.items() if values[name] is not None}

    def source(self, name: str) -> str:
        """Where a value came from: 'default', 'argument', 'run.yaml:3', 'command line' …"""
        return self._sources.get(name, "default")

    def given(self, name: str) -> bool:
        """Whether it was set, and is not a default."""
        return name in self._sources

    @property
    def resumes(self) -> bool:
        """Whether it resumes an earlier run; fast_dev_run never does."""
        return bool(self.resume_from_checkpoint) and not self.fast_dev_run

    def given_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._sources}

    def merged(self, values: Mapping[str, Any], source: str) -> DistributedConfig:
        """A config in which `values` win over these, with their source noted; None leaves a value as it is."""
        new = {name: value for name, value in values.items() if value is not None}
        return build_config([(self.given_values(), "", self._sources), (new, source, {})])


Layer = tuple[Mapping[str, Any], str, Mapping[str, str]]


def build_config(layers: list[Layer]) -> DistributedConfig:
    """The config of several layers, later ones winning: (values, their source, a finer source by name)."""
    values: dict[str, Any] = {}
    sources: Sources = {}
    for layer, source, finer in layers:
        values |= layer
        sources |= {name: finer.get(name, source) for name in layer}
    return DistributedConfig(_sources=sources, **values)


def _problems(invalid: ValidationError, sources: Mapping[str, str]) -> list[Problem]:
    """Pydantic's findings in our words, one a setting."""
    problems: dict[str, Problem] = {}
    for error in invalid.errors():
        name = str(error["loc"][0])
        where = f" ({sources[name]})" if name in sources else ""
        if error["type"] == "extra_forbidden":
            hint = nearest_hint(name, DistributedConfig.model_fields)
            problems[name] = Problem(f"there is no setting {name!r}{where}", do=hint)
        else:  # a union reports each of its members: the last says the most
            message = re.sub(r"^(Value error, |Input )", "", error["msg"])
            problems[name] = Problem(f"{name}={error['input']!r}{where}: {message}", do=_describe(name))
    return list(problems.values())


def _describe(name: str) -> str:
    field = DistributedConfig.model_fields.get(name)
    return f"{name}: {field.description}" if field is not None and field.description else ""
