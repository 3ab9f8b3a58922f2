"""What the ranks of `distributed train` run: a script or a module, with its arguments, and its standard input."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from distributed.core.config import DistributedConfig
from distributed.core.engines.engine import ENGINES, Engine
from distributed.core.errors import Problem
from distributed.core.plan import Decision
from distributed.core.run_dir import RunDir
from distributed.launch.local import preloads_of
from distributed.launch.preflight import check_module, check_script
from distributed.launch.request import LaunchRequest


def read_command(
    script: str | None, module: str | None, arguments: Sequence[str]
) -> tuple[tuple[str, ...], list[Problem]]:
    """The command, as it would follow `python`, and what is wrong with it.

    >>> read_command(None, None, [])[1][0].do
    'distributed train --script train.py, or: distributed train -m package.module'
    """
    if script is not None and module is not None:
        why = "a rank runs one program"
        return (script, *arguments), [
            Problem(f"--script {script} and -m {module}", why=why, do="leave one of them out")
        ]
    if module is not None:
        return ("-m", module, *arguments), check_module(module)
    if script is not None:
        return (script, *arguments), check_script(script)
    do = "distributed train --script train.py, or: distributed train -m package.module"
    return ("train.py",), [Problem("no program is named", why="every rank runs a script or a module", do=do)]


def has_input() -> bool:
    """Whether rank 0 may read what this process could: not from a terminal that another job has in the foreground."""
    try:
        os.fstat(0)
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # closed, or a terminal of another session
        return False


def about_preloads(request: LaunchRequest) -> list[Decision]:
    """What a warm parent does not import for this program, and why."""
    found = preloads_of(request)
    if found is None or not found.left_out:
        return []
    if found.modules:
        choice = f"each rank imports {', '.join(found.left_out)} itself"
        return [Decision(choice, f"{found.why} they are imported, and they read variables then", "warm_start")]
    reason = f"{found.why} {found.left_out[0]} is imported, which reads variables then"
    return [Decision("each rank starts as a Python of its own", reason, "warm_start")]


# What a launcher itself obeys, whatever its ranks run.
_OF_LAUNCHER = (
    *("num_gpus", "num_nodes", "gpus_per_node", "min_nodes", "max_nodes", "node_rank", "master_addr", "master_port"),
    *("address", "device", "share_gpus", "min_gpus", "max_restarts", "requeue_exit_code", "run_dir", "warm_start"),
    "progress",
)


def about_plain_script(config: DistributedConfig, engine: Engine, command: Sequence[str], run_dir: str) -> str:
    """What to say once a program has run that makes no plan: which settings had no effect; "" if all had one."""
    if any(Path(run_dir).glob(f"**/{RunDir(run_dir).plan.name}")):
        return ""
    given = config.given_values()
    idle = [name for name in given if name not in _OF_LAUNCHER and not (name == "backend" and _has_part(engine))]
    idle = [name for name in idle if not (name == "resume_from_checkpoint" and given[name] is True)]
    if not idle:
        return ""
    settings = ", ".join(f"{name}={given[name]} ({config.source(name)})" for name in idle)
    program = program_of(command)
    return f"warning: {program} used no Trainer and no distributed.start: these settings had no effect: {settings}"


def program_of(command: Sequence[str]) -> str:
    """The script or the module, as it was named."""
    return command[1] if command[0] == "-m" else command[0]


def _has_part(engine: Engine) -> bool:
    """Whether ranks are started otherwise under this engine, or as plain ones of torch.distributed."""
    is_plain = engine is ENGINES.entries["pytorch-ddp"]
    return is_plain or bool(engine.starts != Engine.starts or engine.processes or engine.roles)
