"""distributed.start: the first call of a script with a loop of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from distributed.core.config import DistributedConfig, build_config
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.errors import PlanError
from distributed.core.settings.typed import Settings
from distributed.launch.preflight import run_dir_of
from distributed.planner.hardware import probe_for
from distributed.planner.parallel import plan_parallel
from distributed.planner.resources import plan_resources
from distributed.trainers.own_loop.relaunch import relaunch
from distributed.trainers.own_loop.run import TrainingRun
from distributed.trainers.settings import build_fit_config, plain, values_of


def start(config: DistributedConfig | Mapping[str, Any] | None = None, **settings: Unpack[Settings]) -> TrainingRun:
    """Begin a run whose loop is the script's own; settings are those of a Trainer.

    In a script that was started by hand, and asks for several ranks, the script is run again as these, and what
    follows this call runs in them alone; under a launcher this process is a rank already.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import torch
    >>> run = start(num_gpus=1, batch_size=8, epochs=2, progress=False, run_dir=tmp / "run")
    >>> model = torch.nn.Linear(4, 1)
    >>> data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    >>> model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data))
    >>> for epoch in run.epochs():
    ...     for x, y in loader:
    ...         run.backward(torch.nn.functional.mse_loss(model(x), y))
    ...         took_step = run.step(optimizer)
    >>> run.history.steps
    8
    """
    return TrainingRun(*begin(config, settings))


def begin(
    config: DistributedConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> tuple[DistributedConfig, WorkerEnv | None, str]:
    """The settings of a run, its world and its directory, in a process that is one of its ranks."""
    keywords = plain(settings)
    given = values_of(config)
    merged = build_fit_config(build_config([(given, "config", {}), (keywords, "argument", {})]), {})
    world = worker_env()
    run_dir = run_dir_of(merged)
    if world is None:
        resources, decisions, problems = plan_resources(merged, probe_for(merged))
        engine = plan_parallel(
            merged,
            resources.world_size,
            resources.num_nodes,
            device=resources.device,
            decisions=decisions,
            problems=problems,
        ).engine
        if problems:
            raise PlanError(problems)
        if resources.world_size > 1:
            relaunch(merged, resources, engine)
    return merged, world, run_dir
