"""Where DeepSpeed keeps state that is not on the device, and whether there is room for it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.plan import Decision, Plan

_OPTIMIZER_BYTES = 16  # a parameter: its master, two moments and, once there are some, its gradient, in fp32
_LEAST_FILE = 1 << 20
_PLACES = {"cpu": "in host memory", "nvme": "in files"}


@dataclass(frozen=True)
class Offloads:
    """ "", "cpu" or "nvme"."""

    optimizer: str = ""
    parameters: str = ""

    @property
    def uses_files(self) -> bool:
        return "nvme" in (self.optimizer, self.parameters)


def plan_offloads(
    config: DistributedConfig, plan: Plan, parameters: int, decisions: list[Decision], problems: list[Problem]
) -> Offloads:
    """What goes where, with everything that stands in its way."""
    is_full = plan.shard.kind == "full"
    offloads = Offloads(
        config.offload_optimizer or ("cpu" if config.cpu_offload else ""),
        config.offload_parameters or ("cpu" if config.cpu_offload and is_full else ""),
    )
    problems += _contradictions(config, is_full)
    if offloads.parameters == "nvme" and plan.device == "cpu" and plan.precision.kind == "fp32":
        why = "on a CPU DeepSpeed would round them to bf16 for their files"
        decisions.append(Decision("the parameters in host memory", why, "mixed_precision=bf16"))
        offloads = replace(offloads, parameters="cpu")
    for what, where, setting in (
        ("the optimizer's state", offloads.optimizer, "offload_optimizer"),
        ("the parameters", offloads.parameters, "offload_parameters"),
    ):
        if where and config.cpu_offload and not config.given(setting):
            decisions.append(Decision(f"{what} {_PLACES[where]}", "cpu_offload is set", setting))
    if offloads.uses_files and 4 * parameters < _LEAST_FILE * plan.world_size:
        why = "DeepSpeed writes files of 1 MiB or more, and each rank's part of this model is smaller"
        decisions.append(Decision("no files", why))
    if offloads.uses_files and config.offload_dir:
        problems += _check_folder(config.offload_dir, _needed(offloads, plan, parameters), plan.run_dir)
    return offloads


def _contradictions(config: DistributedConfig, is_full: bool) -> list[Problem]:
    found = []
    in_files = [name for name in ("offload_optimizer", "offload_parameters") if getattr(config, name) == "nvme"]
    for name in in_files:
        if config.cpu_offload:
            what = f"cpu_offload ({config.source('cpu_offload')}), but {name}='nvme' ({config.source(name)})"
            found.append(Problem(what, why="one offloads to host memory, the other to files", do="keep one of them"))
    if config.offload_parameters and not is_full:
        found.append(
            Problem(
                f"offload_parameters={config.offload_parameters!r} ({config.source('offload_parameters')})",
                why="only ZeRO-3 shards the parameters, and only sharded parameters can be offloaded",
                do="set zero_stage=3, or offload_optimizer alone",
            )
        )
    elif config.offload_optimizer == "nvme" and not is_full:
        found.append(
            Problem(
                f"offload_optimizer='nvme' ({config.source('offload_optimizer')})",
                why="only ZeRO-3 writes files; in the other stages DeepSpeed would keep the state in host memory",
                do="set zero_stage=3, or offload_optimizer='cpu'",
            )
        )
    if in_files and not config.offload_dir:
        what = " and ".join(f"{name}='nvme'" for name in in_files) + " without offload_dir"
        found.append(Problem(what, why="the files need a place", do="set offload_dir to a folder on a fast local disk"))
    if config.offload_dir and not in_files:
        what = f"offload_dir={config.offload_dir!r} ({config.source('offload_dir')}) would have no effect"
        found.append(Problem(what, do="set offload_optimizer='nvme' or offload_parameters='nvme', or leave it out"))
    return found


def _needed(offloads: Offloads, plan: Plan, parameters: int) -> int:
    """Bytes on each node."""
    each = _OPTIMIZER_BYTES if offloads.optimizer == "nvme" else 0
    if offloads.parameters == "nvme":
        each += 4 if plan.precision.kind == "fp32" else 2
    return parameters * each * plan.ranks_per_node // plan.world_size


def _check_folder(folder: str, needed: int, run_dir: str) -> list[Problem]:
    """Make the folder, unless this is a dry run, and see that the state fits."""
    do = "set offload_dir to a folder on a fast local disk that you may write to"
    try:
        if run_dir:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        free = _left_behind(folder, run_dir)  # before the rest, as another rank may be taking it away
        free += shutil.disk_usage(_existing(folder)).free
    except OSError as error:
        return [Problem(f"offload_dir={folder!r} cannot be written to", why=error.strerror or str(error), do=do)]
    if free >= needed:
        return []
    why = f"the state of each node needs {_size(needed)} there, and {_size(free)} are free"
    return [Problem(f"offload_dir={folder!r} is too small", why=why, do="make room, or set another folder")]


def _existing(folder: str) -> Path:
    path = Path(folder).absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _left_behind(folder: str, run_dir: str) -> int:
    """Bytes that this run has there from before it was started again, when it takes them away."""
    total = 0
    for parent, _, names in os.walk(files_of(folder, run_dir)):
        for name in names:
            with suppress(FileNotFoundError):  # another rank has begun
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _size(count: int) -> str:
    """
    >>> _size(1_234_567), _size(900), _size(80 * 10**9)
    ('1.2 MB', '900 bytes', '80.0 GB')
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def files_of(folder: str, run_dir: str) -> Path:
    """A run's own place in a folder that others may use too; the same when it is started again."""
    return Path(folder) / f"deepspeed-{hashlib.sha256(os.path.abspath(run_dir).encode()).hexdigest()[:12]}"
