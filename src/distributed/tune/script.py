"""A script as the function of a trial: it runs as `distributed train` runs it, with the trial's parameters.

Those that are settings of a run (learning_rate, batch_size …) win over the script's own; the script finds the others in
`tune.params()`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.core.config import DistributedConfig
from distributed.core.env import OVERRIDES, WorkerEnv, environ_with
from distributed.core.errors import ConfigError, Problem, TaskError
from distributed.core.run_dir import RunDir
from distributed.launch.local import LocalLauncher
from distributed.launch.ports import free_port
from distributed.launch.preflight import next_attempt
from distributed.launch.request import LaunchRequest
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.observe.trial import current_trial
from distributed.planner.hardware import probe_hardware
from distributed.tune.results.results import split_settings
from distributed.tune.space import Choice, Constant, Float, Grid, Int, Space

Given = Mapping[str, list[Any]]  # settings by name: the value, and where it was given


@dataclass(frozen=True)
class ScriptTrial:
    """Called with a trial's parameters, in the trial's process."""

    script: str
    arguments: tuple[str, ...] = ()
    given: Given = field(default_factory=dict)
    ranks: int = 1

    @property
    def name(self) -> str:
        return os.path.basename(self.script)

    def __call__(self, config: dict[str, Any]) -> None:
        trial = current_trial()
        assert trial is not None
        run_dir = os.path.join(trial.directory, trial.run)
        settings, _ = split_settings(dict(dict.items(config)))  # which is not yet reading them: the Trainer does
        overrides = {**self.given, **{name: [value, f"trial {trial.id}"] for name, value in settings.items()}}
        variables = {OVERRIDES: json.dumps(overrides)}
        if self.ranks == 1:
            self._run_here(run_dir, variables)
        else:
            self._launch(run_dir, variables)

    def _run_here(self, run_dir: str, variables: Mapping[str, str]) -> None:
        """As the only rank of a world, in this process, which has its imports behind it."""
        place = WorkerEnv(master_port=free_port(), run_dir=run_dir, attempt=next_attempt(run_dir), nominal_ranks=1)
        os.makedirs(RunDir(run_dir).attempt(place.attempt), exist_ok=True)
        sys.argv = [self.script, *self.arguments]
        sys.path[0] = os.path.dirname(os.path.realpath(self.script))
        with environ_with({**place.to_environ(), **variables}):
            try:
                runpy.run_path(self.script, run_name="__main__")
            except SystemExit as ending:
                if ending.code not in (None, 0):
                    raise TaskError(f"the script ended itself with {ending.code!r}") from ending

    def _launch(self, run_dir: str, variables: Mapping[str, str]) -> None:
        hardware = probe_hardware()
        config = DistributedConfig(**{name: value for name, (value, _) in self.given.items()})
        request = LaunchRequest(
            command=(self.script, *self.arguments),
            run_dir=run_dir,
            ranks_per_node=self.ranks,
            threads_per_rank=max(1, hardware.cpu_cores // self.ranks),
            env=variables,
            attempt=next_attempt(run_dir),
            device="cuda" if hardware.gpus else "cpu",
            warm=config.warm_start,
        )
        os.makedirs(run_dir, exist_ok=True)
        LocalLauncher().run(request, limits=RestartLimits.of(config))


def setting_problems(space: Space) -> list[Problem]:
    """Parameters that are settings, and may be what that setting cannot be."""
    problems: list[Problem] = []
    for name, domain in space.domains.items():
        if isinstance(domain, Choice | Grid):
            values: tuple[Any, ...] = domain.values
        elif isinstance(domain, Float | Int):
            values = (domain.low, domain.high)
        else:
            values = (domain.value,) if isinstance(domain, Constant) else ()
        for value in values:
            settings, _ = split_settings({name: value})
            try:
                DistributedConfig(**settings)
            except ConfigError as error:
                problems += [
                    Problem(f"{name}: {value!r} is not a legal value", problem.what) for problem in error.problems
                ]
                break
    return problems
