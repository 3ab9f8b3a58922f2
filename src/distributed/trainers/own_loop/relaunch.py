"""A script that asks for several ranks, and was started as one process, is started again as these ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NoReturn

import torch

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError, DistributedError
from distributed.launch.base import launcher_of
from distributed.launch.node.stop_signals import Stopped
from distributed.launch.preflight import check_port, check_resume, check_run_dir, new_run_dir, next_attempt
from distributed.launch.request import LaunchRequest
from distributed.launch.run_lock import owned
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.observe.live import RunScreen
from distributed.observe.shown_error import show_error
from distributed.planner.resources import Resources
from distributed.trainers.launching import refuse


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
    run_dir, resumes = config.run_dir or new_run_dir(), bool(config.resume_from_checkpoint)
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
    ).for_engine(engine, config)
    at = check_resume(config.resume_from_checkpoint)
    refuse([*check_run_dir(run_dir, resumes), *at, *check_port(launch)])
    with owned(run_dir, resume=resumes):
        refuse(check_run_dir(run_dir, resumes))  # the one that was waited for may have begun since
        launch = replace(launch, attempt=next_attempt(run_dir))
        screen = RunScreen(run_dir, launch.attempt, shows_progress=config.progress)
        try:
            limits = RestartLimits.of(config)
            launcher_of(ENGINES.entries[engine]).run(launch, screen, limits=limits, on_stop=screen.stopping)
        finally:
            screen.close()


def _this_program() -> tuple[str, ...]:
    """The command that was given to Python: a script or a module, with its arguments."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return ("-m", spec.name.removesuffix(".__main__"), *sys.argv[1:])
    if path is not None:
        return (path, *sys.argv[1:])
    raise ConfigError(
        "distributed.start with several ranks, in a notebook or an interactive Python",
        why="each rank runs the script that calls it, and here is none",
        do="write the loop into a script, or use distributed.Trainer, which works here",
    )
