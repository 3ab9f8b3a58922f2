"""distributed resize: give a run that is going on another number of ranks, without stopping it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distributed.core.errors import ConfigError
from distributed.core.heartbeat import Phase, read_beat
from distributed.launch.supervisor import ask_for_ranks


def resize(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The directory of the run.")],
    num_gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks that it shall have from now on.")],
) -> None:
    """Give a run on this machine another number of ranks.

    Its ranks finish a step together, hand their state over in memory, and go on as N. The global batch stays: fewer
    ranks accumulate more. No sample is lost or repeated; under reproducible=bitwise the result's bytes stay the same.
    Nodes join and leave a run by themselves: see min_nodes and max_nodes.

    \b
    Example:
      distributed resize runs/20260101-120000-1f2e --num-gpus 4
    """
    if not Path(run_dir, "attempts").is_dir():
        raise ConfigError(f"there is no run in {run_dir}", do="name the run directory that `distributed train` printed")
    if not _goes_on(Path(run_dir)):
        raise ConfigError(
            f"the run in {run_dir} is not going on",
            why="none of its ranks is at work",
            do=f"start it again with that many: distributed train --run-dir {run_dir} --num-gpus {num_gpus} "
            "resume_from_checkpoint=true …",
        )
    ask_for_ranks(run_dir, num_gpus)
    typer.echo(f"asked for {num_gpus} ranks; the run's own screen and events.jsonl tell when it has them")


def _goes_on(run_dir: Path) -> bool:
    attempts = [path for path in (run_dir / "attempts").iterdir() if path.name.isdigit()]
    newest = max(attempts, key=lambda path: int(path.name), default=None)
    beats = [read_beat(path) for path in newest.glob("heartbeat-*")] if newest is not None else []
    return any(beat is not None and beat.phase is not Phase.ENDED for beat in beats)
