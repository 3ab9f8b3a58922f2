"""distributed resize: change the number of ranks of a running run, without stopping it."""

from __future__ import annotations

from typing import Annotated

import typer

from distributed.core.errors import ConfigError
from distributed.core.protocol.heartbeat import Phase, read_beat
from distributed.core.run_dir import RunDir
from distributed.launch.supervise.resize_request import ask_for_ranks


def resize(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The directory of the run.")],
    num_gpus: Annotated[int, typer.Option(min=1, metavar="N", help="The number of ranks from now on.")],
) -> None:
    """Change the number of ranks of a run on this machine.

    Its ranks finish a step together, hand their state over in memory, and continue as N. The global batch stays: fewer
    ranks accumulate more. No sample is lost or repeated; under reproducible=bitwise the result's bytes stay the same.
    Nodes join and leave a run by themselves: see min_nodes and max_nodes.

    \b
    Example:
      distributed resize runs/20260101-120000-1f2e --num-gpus 4
    """
    if not RunDir(run_dir).attempts.is_dir():
        raise ConfigError(f"there is no run in {run_dir}", do="name the run directory that `distributed train` printed")
    if not _is_running(RunDir(run_dir)):
        raise ConfigError(
            f"the run in {run_dir} is not running",
            why="every rank of its last attempt has ended",
            do=f"resume it: distributed train --script … --run-dir {run_dir} --num-gpus {num_gpus} "
            "resume_from_checkpoint=true",
        )
    ask_for_ranks(run_dir, num_gpus)
    typer.echo(f"requested {num_gpus} ranks; the run's screen and events.jsonl report when it has them")


def _is_running(run: RunDir) -> bool:
    newest = run.attempt(max(run.attempt_numbers(), default=0))
    beats = [read_beat(path) for path in newest.heartbeats().values()]
    return any(beat is not None and beat.phase is not Phase.ENDED for beat in beats)
