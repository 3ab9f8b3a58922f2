"""distributed diagnose: why a run failed, from its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from distributed.launch.diagnose.causes import known_causes
from distributed.launch.diagnose.diagnosis import diagnose as read
from distributed.launch.diagnose.text import to_json, to_text


def _print_causes(wanted: bool) -> None:
    if wanted:
        width = max(len(cause.name) for cause in known_causes())
        for cause in known_causes():
            typer.echo(f"{cause.name:<{width}}  {cause.title}")
        raise typer.Exit


def diagnose(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run directory, a folder of logs, or a log.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    causes: Annotated[
        bool, typer.Option("--causes", callback=_print_causes, is_eager=True, help="List the causes that are known.")
    ] = False,
) -> None:
    """Say why a run failed: the rank that failed first, the cause, the line that shows it, and what to do.

    Reads the logs of all ranks, failure records, and events of a run directory; or logs that other launchers left:
    torchrun's --log-dir, srun's and mpirun's output, a pod's log, dmesg. Nothing is changed, and no process is asked.

    \b
    Examples:
      distributed diagnose runs/20260101-120000-1f2e
      distributed diagnose slurm-4711.out
      distributed diagnose logs/ --json
    """
    found = read(path)
    typer.echo(json.dumps(to_json(found), indent=1) if as_json else to_text(found))
