"""A `fit` that starts processes: what PyTorch's and TensorFlow's have in common. No torch is imported here."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from distributed.checkpoint.storage.lineage import check_unused
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.atomic import Sealed, make_private, write_private
from distributed.core.config import DistributedConfig
from distributed.core.documents.run_config import RunConfig
from distributed.core.engines.engine import ENGINES, Engine, engine_of
from distributed.core.env import TICKET, WorkerEnv
from distributed.core.errors import ConfigError, LaunchError, Problem, RankFailedError
from distributed.core.history import History
from distributed.core.plan import Plan
from distributed.core.protocol.ticket import Ticket
from distributed.core.run_dir import RunDir
from distributed.core.secrets import mask_text
from distributed.launch.base import launcher_of
from distributed.launch.preflight import check_run_dir, next_attempt
from distributed.launch.request import LaunchRequest
from distributed.launch.run_lock import owned
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.observe.live import RunScreen
from distributed.runtime.launch_id import launch_id


def launch_job(
    plan: Plan,
    config: DistributedConfig,
    launch: LaunchRequest,
    suffix: str,
    write: Callable[[Path], Sealed],
    *,
    starts: Engine | None = None,
) -> History:
    """Train in new processes, and return what they have written down of it.

    `starts` is the engine whose launcher starts them; None: the one that trains.
    """
    outcome = RunDir(launch.run_dir).history
    launch_ranks(plan, config, launch, suffix, write=write, outcome=outcome, starts=starts)
    history = History.load(outcome)
    return replace(history, checkpoint=_unmasked(history.checkpoint, plan))


def launch_ranks(
    plan: Plan,
    config: DistributedConfig,
    launch: LaunchRequest,
    suffix: str,
    *,
    write: Callable[[Path], Sealed],
    outcome: Path,
    starts: Engine | None = None,
) -> None:
    """Send a job to new processes in a file that ends so, and wait until they have written the outcome.

    The file is there while they run; it is a pickle for children of this process alone, and no other launch's.
    """
    run = RunDir(make_private(launch.run_dir))
    outcome.unlink(missing_ok=True)  # of an earlier attempt
    payload = run.payload(uuid.uuid4().hex[:12], suffix)
    sealed = write(payload)
    try:
        record_run(plan, config)
        ticket = Ticket(sealed, tuple(path or os.getcwd() for path in sys.path))
        launch = replace(launch, env=dict(launch.env) | {TICKET: ticket.to_text()})
        try:
            run_on_screen(
                starts or ENGINES.entries[plan.strategy], launch, config, shows_progress=plan.observe.progress
            )
        except RankFailedError as failed:
            is_ours = failed.exit_code != RankFailedError.exit_code  # then its text says all
            trace = "" if is_ours else f"\n{failed.traceback}\n"
            failed.add_note(f"{trace}the log of rank {failed.rank}: {failed.log_path}")
            raise
        except KeyboardInterrupt:
            if not outcome.exists():  # stopped before there was anything to keep
                raise
    finally:
        os.close(sealed.descriptor)
        payload.unlink(missing_ok=True)


def run_on_screen(engine: Engine, launch: LaunchRequest, config: DistributedConfig, *, shows_progress: bool) -> None:
    """Run the ranks of a launch to their end, and show how they come along."""
    screen = RunScreen(launch.run_dir, launch.attempt, shows_progress=shows_progress)
    try:
        launcher_of(engine).run(launch, screen, limits=RestartLimits.of(config), on_stop=screen.stopping)
    finally:
        screen.close()


@contextmanager
def next_attempt_in(run_dir: str, problems: list[Problem], *, resumes: bool) -> Iterator[int]:
    """The number of the attempt that begins, in a run directory that is this process's own meanwhile.

    Raises all `problems`, and those of the directory.
    """
    refuse([*check_run_dir(run_dir, resumes), *problems])
    with owned(run_dir, resume=resumes):
        refuse(check_run_dir(run_dir, resumes))  # the one that was waited for may have begun since
        yield next_attempt(run_dir)


@contextmanager
def recorded_in_world(plan: Plan, config: DistributedConfig, env: WorkerEnv, *, is_held: bool) -> Iterator[None]:
    """Rank 0 of a launcher's world records the run, and holds its directory meanwhile, unless the launcher does."""
    with ExitStack() as held:
        if env.is_main:
            if not is_held:
                resumes = bool(plan.checkpoint.resume)
                refuse(check_run_dir(plan.run_dir, resumes))
                token = launch_id(plan.run_dir, env) if env.restarts else ""
                held.enter_context(owned(plan.run_dir, resume=resumes, token=token))
            record_run(plan, config)
        yield


def _unmasked(path: str, plan: Plan) -> str:
    """A path in a URL with a password, as this process knows it: what ranks write down has none."""
    places = [plan.checkpoint.dir, *([plan.checkpoint.resume] if isinstance(plan.checkpoint.resume, str) else [])]
    real = next((place for place in places if path.startswith(mask_text(place))), None)
    return path if real is None else real + path[len(mask_text(real)) :]


def record_run(plan: Plan, config: DistributedConfig) -> None:
    """Write plan.json, and config.json unless the command line wrote it, which alone knows the script's arguments."""
    run = RunDir(make_private(plan.run_dir))
    write_private(run.plan, plan.to_json())
    if not run.config.exists():
        RunConfig.of(config, sys.argv or [""]).write(run.path)


def check_checkpoint_dir(plan: Plan) -> list[Problem]:
    """Problems if a run that does not resume would write among another run's checkpoints."""
    return [] if plan.checkpoint.resume else check_unused(open_storage(plan.checkpoint.dir))


def refuse_several_nodes(config: DistributedConfig) -> None:
    """Raise where a process that was started alone would have to start ranks on other machines."""
    if config.num_nodes > 1 and not engine_of(config).spans:
        raise ConfigError(
            f"num_nodes={config.num_nodes}, but this process was started alone",
            why="a script can start processes on its own machine only",
            do=f"on every node: distributed train --script {sys.argv[0] or 'train.py'} --backend {config.backend} "
            f"--num-nodes {config.num_nodes} --gpus-per-node … --master-addr HOST_OF_NODE_0",
        )


def refuse(problems: list[Problem]) -> None:
    if problems:
        raise LaunchError(problems)


def active_mlflow_run() -> str:
    """The run that the script has opened with MLflow, if it uses it."""
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None else None
    return "" if run is None else str(run.info.run_id)
