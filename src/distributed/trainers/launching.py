"""A `fit` that starts processes: what is the same whatever framework trains in them. No torch is imported here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from distributed.core.engines import ENGINES
from distributed.core.errors import LaunchError, Problem, RankFailedError
from distributed.core.history import History
from distributed.core.plan import Plan
from distributed.core.registry import load_target
from distributed.core.run_files import HISTORY, PATHS
from distributed.launch.request import LaunchRequest
from distributed.launch.supervisor import Patience
from distributed.observe.live import RunScreen


def launch_job(
    plan: Plan, launch: LaunchRequest, patience: Patience, payload: str, write: Callable[[Path], None]
) -> History:
    """Send a job to new processes in a file of that name, and wait for them.

    The file is there while they run; it is a pickle for children of this process alone.
    """
    run_dir = Path(launch.run_dir)
    outcome = run_dir / HISTORY
    run_dir.mkdir(parents=True, exist_ok=True)
    outcome.unlink(missing_ok=True)  # of an earlier attempt
    try:
        write(run_dir / payload)
        write_plan(plan)
        (run_dir / PATHS).write_text(json.dumps({"sys_path": [path or os.getcwd() for path in sys.path]}))
        screen = RunScreen(launch.run_dir, launch.attempt, shows_progress=plan.observe.progress)
        try:
            launcher = load_target(ENGINES.entries[plan.strategy].starts)()
            launcher.run(launch, screen, patience=patience, on_stop=screen.stopping)
        except RankFailedError as failed:
            is_ours = failed.exit_code != RankFailedError.exit_code  # then its text says all
            trace = "" if is_ours else f"\n{failed.traceback}\n"
            failed.add_note(f"{trace}the log of rank {failed.rank}: {failed.log_path}")
            raise
        except KeyboardInterrupt:
            if not outcome.exists():  # stopped before there was anything to keep
                raise
        finally:
            screen.close()
    finally:
        (run_dir / payload).unlink(missing_ok=True)
    return History.load(outcome)


def write_plan(plan: Plan) -> None:
    path = Path(plan.run_dir)
    path.mkdir(parents=True, exist_ok=True)
    (path / "plan.json").write_text(plan.to_json())
    if not (path / "config.json").exists():  # the command line wrote one, with the script and all sources
        (path / "config.json").write_text(json.dumps(plan.settings, indent=2) + "\n")


def refuse(problems: list[Problem]) -> None:
    if problems:
        raise LaunchError(problems)


def active_mlflow_run() -> str:
    """The run that the script has opened with MLflow, if it uses it."""
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None else None
    return "" if run is None else str(run.info.run_id)
