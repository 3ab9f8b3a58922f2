"""Settings from a YAML file and from `key=value` words, each with where it stands, so that every error can say it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import yaml

from distributed.core.config import DistributedConfig, build_config
from distributed.core.errors import ConfigError, Problem

COMMAND_LINE = "command line"
_NOT_SETTINGS = {"self", "_sources"}


@dataclass(frozen=True)
class Layer:
    """Settings of one origin, the exact place of each, and what was wrong in reading them."""

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def read_file(path: str) -> Layer:
    """A YAML mapping of settings; its lines are the sources."""
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as stream:
            loader = yaml.SafeLoader(stream.read())
        root = loader.get_single_node()
    except OSError as error:
        reason = error.strerror or str(error)
        return Layer(
            problems=(
                Problem(f"the settings file {path} cannot be read", why=reason, do="check the path: --config FILE"),
            )
        )
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return Layer(problems=(Problem(f"{path} is not valid YAML", why=_yaml_reason(error), do="correct that line"),))
    if root is None:
        return Layer()
    if not isinstance(root, yaml.MappingNode):
        return Layer(
            problems=(Problem(f"{path} does not hold settings", do="write one a line, for example: batch_size: 32"),)
        )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[Problem] = []
    for key_node, value_node in root.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        try:
            key, value = str(loader.construct_object(key_node)), loader.construct_object(value_node, deep=True)
        except yaml.YAMLError as error:
            problems.append(Problem(f"{where} cannot be read", why=_yaml_reason(error)))
            continue
        if key in values:
            problems.append(Problem(f"{key} is set twice: {sources[key]} and {where}", do="keep one of them"))
        text = value_node.value if isinstance(value_node, yaml.ScalarNode) else ""
        values[key], sources[key] = _as_field(key, value, text), where
    return Layer(values, sources, tuple(problems))


def read_words(words: Iterable[str], options: Mapping[str, str | None]) -> Layer:
    """`key=value` words and the options that were given; a value is read as YAML reads a scalar.

    >>> read_words(["epochs=3", "mixed_precision=true"], {"num_gpus": "2"}).values
    {'num_gpus': 2, 'epochs': 3, 'mixed_precision': True}
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, text in options.items():
        if text is not None:
            values[key] = _parse(key, text)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            problems.append(
                Problem(
                    f"{word!r} is not a setting",
                    why="a setting is written KEY=VALUE",
                    do=f"for the script, write: -- {word}",
                )
            )
        elif key in values:
            problems.append(Problem(f"{key} is set twice on the command line", do="keep one of them"))
        else:
            values[key] = _parse(key, text)
    return Layer(values, dict.fromkeys(values, COMMAND_LINE), tuple(problems))


def gather(
    config_path: str | None,
    words: Iterable[str],
    options: Mapping[str, str | None],
    *,
    base: DistributedConfig | None = None,
) -> DistributedConfig:
    """The config of defaults < base < file < command line, or one ConfigError with everything that is wrong."""
    layers = [Layer(base.given_values(), {name: base.source(name) for name in base.given_values()})] if base else []
    words = list(words)
    layers += [read_file(config_path)] if config_path is not None else []
    layers.append(read_words(words, options))
    problems = [problem for layer in layers for problem in layer.problems]
    for layer in layers:  # names that no setting can have, because Python's call syntax needs them
        problems += [Problem(f"there is no setting {name!r}") for name in layer.values if name in _NOT_SETTINGS]
    try:
        config = build_config([(_plain(layer.values), "", layer.sources) for layer in layers])
    except ConfigError as error:
        raise ConfigError([*problems, *(_for_script(problem, words) for problem in error.problems)]) from None
    if problems:
        raise ConfigError(problems)
    return config


def _for_script(problem: Problem, words: Iterable[str]) -> Problem:
    """What is no setting may be an argument of the script, as Hydra's are."""
    for word in words:
        key = word.partition("=")[0]
        if problem.what == f"there is no setting {key!r} ({COMMAND_LINE})":
            mine = problem.do.startswith("did you mean") and key.isidentifier()
            return replace(
                problem, do=f"{problem.do} Or for the script: -- {word}" if mine else f"for the script: -- {word}"
            )
    return problem


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in _NOT_SETTINGS}


def _parse(key: str, text: str) -> Any:
    try:
        return _as_field(key, yaml.safe_load(text), text)
    except yaml.YAMLError:
        return text


def _as_field(key: str, value: Any, text: str) -> Any:
    """YAML sees a number in `run_dir=2024`; a setting that is a text keeps what was written."""
    setting = DistributedConfig.model_fields.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if setting is not None and is_number and text:
        kinds = {setting.annotation, *get_args(setting.annotation)}
        if str in kinds and not kinds & {int, float}:
            return text
    return value


def _yaml_reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)
