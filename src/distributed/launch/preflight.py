"""Checks before any process starts. They return problems, so that all of them are reported at once."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from distributed.core.config import DistributedConfig
from distributed.core.errors import Problem
from distributed.core.registry import nearest
from distributed.core.run_dir import RunDir
from distributed.launch.ports import free_port, port_in_use
from distributed.launch.program_file import module_file
from distributed.launch.request import LaunchRequest

_MOST_SOURCE = 4 * 2**20  # bytes of a script that are checked


def check_script(path: str) -> list[Problem]:
    """Problems if the script does not exist or is not Python."""
    if os.path.isfile(path):
        return _check_source(path)
    if os.path.isdir(path):
        return [Problem(f"the script {path} is a directory", do=f"name a file in it: {_some(_scripts_in(Path(path)))}")]
    folder = Path(path).parent
    if not folder.is_dir():
        return [Problem(f"the script {path} does not exist", why=f"the directory {folder} does not exist", do=_here())]
    names = _scripts_in(folder)
    by_stem = {Path(name).stem: name for name in names}
    close = [str(folder / by_stem[stem]) for stem in nearest(Path(path).stem, by_stem)]
    do = f"did you mean {' or '.join(close)}?" if close else f"in {folder.absolute()} there is: {_some(names)}"
    return [Problem(f"the script {path} does not exist", why=_here(), do=do)]


def check_module(name: str) -> list[Problem]:
    """Problems if `python -m name` would find nothing to run, or no Python."""
    path = module_file(name)
    if path is not None:
        return _check_source(path) if path.endswith(".py") else []
    if name.endswith(".py"):
        return [Problem(f"-m {name}", why="-m names a module, and this is a file", do=f"--script {name}")]
    do = f"start from the folder that {name.partition('.')[0]} is in, or install it; python -m {name} must find it too"
    return [Problem(f"there is no module {name} to run", why=_here(), do=do)]


def _check_source(path: str) -> list[Problem]:
    """Problems if the script does not compile, as a rank would compile it."""
    try:
        with open(path, "rb") as file:
            source = file.read(_MOST_SOURCE)
    except OSError as failed:
        return [Problem(f"the script {path} cannot be read", why=failed.strerror or str(failed), do=f"ls -l {path}")]
    if b"\0" in source:
        return [
            Problem(
                f"{path} is not a Python script",
                why="the file contains a zero byte",
                do="name a Python file: --script train.py",
            )
        ]
    if len(source) == _MOST_SOURCE:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show them
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as wrong:
        line = f"\n    {wrong.text.strip()}" if wrong.text else ""
        why = f"{wrong.msg}{line}"
        return [
            Problem(
                f"{path}:{wrong.lineno or 1} is not valid Python",
                why=why,
                do="correct that line, or name another --script",
            )
        ]
    except (ValueError, RecursionError, MemoryError):  # a rank will report it
        return []
    return []


def _here() -> str:
    return f"looked from {os.getcwd()}"


def _scripts_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".py")


def _some(names: list[str], most: int = 6) -> str:
    return (", ".join(names[:most]) + (", …" if len(names) > most else "")) or "no Python file"


def check_resume(resume: bool | str) -> list[Problem]:
    """Problems if the local folder that a run resumes from holds no checkpoint."""
    if isinstance(resume, bool) or "::" in resume or ("://" in resume and not resume.startswith("file://")):
        return []
    path = Path(resume.removeprefix("file://"))
    if path.is_dir() and (_is_step(path) or _steps_in(path)):
        return []
    what = f"there is no checkpoint at {resume} [resume_from_checkpoint]"
    if path.is_dir() and (inner := RunDir(path).checkpoints).is_dir() and _steps_in(inner):
        return [
            Problem(
                what,
                why="the folder is a run directory, and not one of its checkpoints",
                do=f"set resume_from_checkpoint={inner}",
            )
        ]
    if path.is_dir() or path.is_file():
        why = "the folder holds no checkpoint" if path.is_dir() else "the path is a file, and a checkpoint is a folder"
        return [Problem(what, why=why, do="name a checkpoint_dir, or the folder step-… of one checkpoint")]
    beside = _steps_in(path.parent) if path.parent.is_dir() else []
    do = (
        f"in {path.parent} there is: {_some(beside)}" if beside else "distributed checkpoint ls shows what a folder has"
    )
    return [Problem(what, why=f"the folder does not exist, {_here()}", do=do)]


def _is_step(path: Path) -> bool:
    return path.name.startswith("step-")


def _steps_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _is_step(entry))


def check_port(request: LaunchRequest) -> list[Problem]:
    """Problems if the port that this machine must open is in use.

    Nodes without --node-rank may share a machine, so with several nodes only node 0 is checked.
    """
    if request.num_nodes == 1:
        port = request.master_port
    else:
        port = request.rendezvous_endpoint[1] if request.node_rank == 0 else None
    if port is None or not port_in_use(port):
        return []
    another = "leave master_port out to get a free one" if request.num_nodes == 1 else "the same on all nodes"
    return [
        Problem(
            f"port {port} is in use on this machine",
            why=f"the rendezvous of the {'ranks' if request.num_nodes == 1 else 'nodes'} needs that port",
            do=f"set master_port={free_port()}, which is free ({another}), or end what listens there: ss -ltnp",
        )
    ]


def check_run_dir(run_dir: str, resume: bool, *, may_reuse: bool = True) -> list[Problem]:
    """Problems if the directory cannot be written, or holds another run that is not resumed.

    `may_reuse`: the files of a launch whose ranks never started. A launch that is still starting holds the lock.
    """
    path = Path(run_dir)
    if path.exists() and not path.is_dir():
        return [Problem(f"the run directory {run_dir} is a file", do="choose another run_dir")]
    existing = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            Problem(
                f"the run directory {run_dir} cannot be written",
                why=f"no permission in {existing}" if existing.is_dir() else f"{existing} is a file",
                do="choose another run_dir",
            )
        ]
    if resume or not holds_run(path) or (may_reuse and _never_began(path)):
        return []
    return [
        Problem(
            f"the run directory {run_dir} holds another run, {_when(path)}",
            why="the logs and events of both runs would be mixed",
            do="set another run_dir, or resume that run: resume_from_checkpoint=true",
        )
    ]


def holds_run(path: Path) -> bool:
    return bool(_traces(path))


def _traces(path: Path) -> list[Path]:
    """The files of a run that used a directory."""
    run = RunDir(path)
    return [trace for trace in (run.events, run.plan, run.config, run.attempts) if trace.exists()]


def _never_began(path: Path) -> bool:
    """Whether a directory holds only a launcher's files: no rank logged, took a step or saved anything."""
    run = RunDir(path)
    if set(path.iterdir()) - {run.config, run.attempts, run.lock} or not run.attempts.is_dir():
        return False
    attempts = [run.attempt(number) for number in run.attempt_numbers()]
    left = {file for file in run.attempts.rglob("*") if file.is_file()} - {each.parent_log for each in attempts}
    logs = {log for each in attempts for log in each.logs()}
    return left <= logs and not any(log.stat().st_size for log in left)


def _when(path: Path) -> str:
    """When the run in a directory was last active, and how it ended, if that is recorded."""
    moments = [trace.stat().st_mtime for trace in _traces(path)]
    text = f"last active {datetime.fromtimestamp(max(moments)):%Y-%m-%d %H:%M:%S}"
    ends = {"RunEnded", "RankFailed"}
    last = next((kind for kind in reversed(list(_event_kinds(RunDir(path).events))) if kind in ends), "")
    return text + {"RunEnded": " and finished", "RankFailed": " and failed"}.get(last, "")


def _event_kinds(path: Path) -> Iterator[str]:
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                yield str(json.loads(line).get("event", ""))
            except ValueError:  # the last line of a killed run
                continue


def next_attempt(run_dir: str) -> int:
    """The number of a new attempt in a run directory: 0 in a fresh one."""
    return max(RunDir(run_dir).attempt_numbers(), default=-1) + 1


def run_dir_of(config: DistributedConfig) -> str:
    """Where a run is to write. One that only tries leaves the directory that is named to the run that it tries.

    >>> run_dir_of(DistributedConfig(run_dir="runs/a"))
    'runs/a'
    >>> run_dir_of(DistributedConfig(run_dir="runs/a", fast_dev_run=True)).startswith("runs/a/dev-runs/")
    True
    """
    if config.run_dir and config.fast_dev_run:
        return new_run_dir(str(RunDir(config.run_dir).dev_runs))
    return config.run_dir or new_run_dir()


def new_run_dir(base: str = "runs", now: float | None = None, token: str | None = None) -> str:
    """A new name for a run directory: the time, and four digits for runs of the same second.

    >>> new_run_dir("runs", now=0.0, token="1f2e")[-5:]
    '-1f2e'
    """
    moment = datetime.fromtimestamp(time.time() if now is None else now)
    return os.path.join(base, f"{moment:%Y%m%d-%H%M%S}-{token or os.urandom(2).hex()}")
