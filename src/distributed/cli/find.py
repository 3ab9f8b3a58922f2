"""distributed find: run a script's data and model in short trials, to find a learning rate or a batch size."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from distributed.cli import options as opt
from distributed.cli.settings import gather
from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import given_settings
from distributed.core.env import FIND, OVERRIDES, inherited_environ, worker_env
from distributed.core.errors import ConfigError, LaunchError, Problem
from distributed.launch.preflight import check_script


class Wanted(StrEnum):
    learning_rate = "learning_rate"
    batch_size = "batch_size"


def find(
    context: typer.Context,
    wanted: Annotated[Wanted, typer.Argument(help="What to find.")],
    script: opt.Script,
    settings: opt.Settings = None,
    num_gpus: opt.NumGpus = None,
    backend: opt.Backend = None,
    device: opt.Device = None,
    config: opt.ConfigFile = None,
) -> None:
    """Find the learning rate that a script's first `fit` should begin with, or the largest batch that fits.

    The script is run up to its `fit`, which makes trials of some steps in place of training, prints what they come to,
    and ends. A learning rate comes with a picture of the losses, learning-rate.svg. Nothing else is written.

    \b
    Examples:
      distributed find learning_rate --script train.py --num-gpus 2
      distributed find batch_size --script train.py --num-gpus 8 mixed_precision=bf16 -- --data-dir /data
    """
    problems = check_script(script)
    world = worker_env()
    if world is not None:
        what = f"distributed find, in a rank that {world.launcher} has started"
        problems.append(Problem(what, why="its trials start ranks of their own", do="run it once, without a launcher"))
    options = {"num_gpus": num_gpus, "backend": backend, "device": device}
    try:
        asked = gather(config, settings or [], options)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    problems += _problems(asked, wanted)
    if problems:
        raise LaunchError(problems)
    given = {name: [setting.value, setting.source] for name, setting in given_settings(asked).items()}
    variables = {OVERRIDES: json.dumps(given), FIND: wanted.value}
    os.execve(sys.executable, (sys.executable, script, *(context.obj or ())), inherited_environ() | variables)


def _problems(config: DistributedConfig, wanted: Wanted) -> list[Problem]:
    found = []
    if config.given(wanted.value):
        what = f"{wanted.value} is set ({config.source(wanted.value)}), and is what is to be found"
        found.append(Problem(what, why="the setting would have no effect", do=f"leave {wanted.value} out"))
    if config.num_nodes > 1:
        why = "trials are made on one machine, and scale by its devices"
        found.append(Problem(f"num_nodes={config.num_nodes}", why=why, do="leave num_nodes out"))
    return found
