"""`--dry-run=N`: the script as rank 0 of a dry run, in place of this process; and the refusal of what cannot be had."""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn

from distributed.cli.settings import gather
from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import given_settings
from distributed.core.env import DRY_RUN, OVERRIDES, inherited_environ
from distributed.core.errors import ConfigError, DistributedError, LaunchError, PlanError, Problem
from distributed.planner.adoption import adopt
from distributed.planner.parallel import plan_parallel


def try_out(
    command: tuple[str, ...],
    problems: list[Problem],
    *,
    config_path: str | None,
    words: list[str],
    options: dict[str, str | None],
    value: str,
) -> NoReturn:
    """Replace this process by the script, as rank 0 of a dry run of that many ranks."""
    ranks = int(value) if value.isdecimal() else 0
    if not ranks:
        why = "the value of --dry-run is a number of ranks, at least 1"
        problems.append(Problem(f"--dry-run={value}", why=why, do="--dry-run=8"))
    try:
        config = gather(config_path, words, options)
        if config.num_gpus not in (None, ranks):
            what = f"--dry-run={value}, but num_gpus={config.num_gpus}"
            problems.append(Problem(what, why="both set the number of ranks", do="leave num_gpus out"))
        config = config.merged(_sizes(config, ranks or 1), "--dry-run")
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    obstacles: list[Problem] = []
    whole = adopt(config, problems, ranks or None)
    plan_parallel(whole, ranks or 1, config.num_nodes, device="cpu", decisions=[], problems=obstacles)
    refuse(problems, obstacles, [])
    variables = {OVERRIDES: json.dumps(overrides_of(config)), DRY_RUN: str(ranks)}
    os.execve(sys.executable, (sys.executable, *command), inherited_environ() | variables)


def _sizes(config: DistributedConfig, ranks: int) -> dict[str, int]:
    """The settings `num_nodes` and `num_gpus` for a dry run of that many ranks."""
    per_node = config.gpus_per_node
    nodes = max(1, ranks // per_node) if per_node and not config.given("num_nodes") else config.num_nodes
    return ({"num_nodes": nodes} if nodes > 1 else {}) | {"num_gpus": ranks}


def refuse(settings: list[Problem], obstacles: list[Problem], launch: list[Problem]) -> None:
    """One error with all problems, of the kind of the first."""
    kinds: list[tuple[type[DistributedError], list[Problem]]] = [
        (ConfigError, settings),
        (PlanError, obstacles),
        (LaunchError, launch),
    ]
    for kind, problems in kinds:
        if problems:
            raise kind([*settings, *obstacles, *launch])


def overrides_of(config: DistributedConfig) -> dict[str, list[object]]:
    """What was given to the command, which wins over what the script gives."""
    return {name: [setting.value, setting.source] for name, setting in given_settings(config).items()}
