"""A script that asks for several ranks, and was started as one process, is started again as these ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NoReturn

import torch

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError, DistributedError
from distributed.launch.node.stop_signals import Stopped
from distributed.launch.preflight import check_port, check_resume, run_dir_of
from distributed.launch.request import LaunchRequest
from distributed.observe.shown_error import show_error
from distributed.planner.decisions.network import network_of
from distributed.planner.resources import Resources
from distributed.trainers.launching import next_attempt_in, run_on_screen


def relaunch(config: DistributedConfig, resources: Resources, engine: str) -> NoReturn:
    """Run this script as that many ranks to their end, and end this process with their exit code."""
    try:
        _run(config, resources, engine)
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None
    except DistributedError as failed:
        show_error(failed)
        raise SystemExit(failed.exit_code) from None
    raise SystemExit(0)


def _run(config: DistributedConfig, resources: Resources, engine: str) -> None:
    run_dir, resumes = run_dir_of(config), config.resumes
    launch = LaunchRequest(
        command=_this_program(),
        run_dir=run_dir,
        ranks_per_node=resources.ranks_per_node,
        threads_per_rank=max(1, torch.get_num_threads() // resources.ranks_per_node),
        master_port=config.master_port,
        device=resources.device,
        shares_gpus=resources.shares_gpus,
        gpus=torch.cuda.device_count() if resources.shares_gpus else 0,
        warm=config.warm_start,
        address=config.address,
        network=network_of(config, 1, resources.device),
    ).for_engine(engine, config)
    at = check_resume(config.resumes and config.resume_from_checkpoint)
    with next_attempt_in(run_dir, [*at, *check_port(launch)], resumes=resumes) as attempt:
        launch = replace(launch, attempt=attempt)
        run_on_screen(ENGINES.entries[engine], launch, config, shows_progress=config.progress)


def _this_program() -> tuple[str, ...]:
    """The command that was given to Python: a script or a module, with its arguments."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name != "__main__":  # as it is called in a folder that Python was given
        return ("-m", spec.name.removesuffix(".__main__"), *sys.argv[1:])
    if path is not None:
        return (path, *sys.argv[1:])
    raise ConfigError(
        "distributed.start with several ranks, in a notebook or an interactive Python",
        why="each rank runs the script that calls it, and here is none",
        do="write the loop into a script, or use distributed.Trainer, which works here",
    )
