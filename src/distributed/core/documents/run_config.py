"""config.json: what was asked of a run, each setting with where it came from. Written and read here alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.core.atomic import write_private
from distributed.core.config import DistributedConfig, build_config
from distributed.core.documents import typed_json
from distributed.core.run_dir import RunDir
from distributed.core.secrets import mask_arguments

CONFIG_VERSION = 1  # raised with every change of a field


@dataclass(frozen=True)
class GivenSetting:
    value: Any
    source: str


def given_settings(config: DistributedConfig) -> dict[str, GivenSetting]:
    values = config.model_dump(mode="json")
    return {name: GivenSetting(values[name], config.source(name)) for name in config.given_values()}


@dataclass(frozen=True)
class RunConfig:
    """The script of a run, its arguments, and the settings that were given; secrets are masked when it is written.

    >>> config = DistributedConfig(num_gpus=2, epochs=3)
    >>> RunConfig.of(config, ["train.py", "--fast"]).config.epochs
    3
    """

    script: str
    arguments: tuple[str, ...]
    settings: dict[str, GivenSetting]

    @classmethod
    def of(cls, config: DistributedConfig, command: Sequence[str]) -> RunConfig:
        return cls(command[0], tuple(mask_arguments(command[1:])), given_settings(config))

    @property
    def config(self) -> DistributedConfig:
        """The settings, checked again."""
        values = {name: given.value for name, given in self.settings.items()}
        return build_config([(values, "", {name: given.source for name, given in self.settings.items()})])

    def write(self, run_dir: str | Path) -> None:
        write_private(RunDir(run_dir).config, typed_json.to_json(self, CONFIG_VERSION))

    @classmethod
    def read(cls, run_dir: str | Path) -> RunConfig:
        path = RunDir(run_dir).config
        return typed_json.read(cls, path, CONFIG_VERSION, why="a run writes its settings there when it begins")
