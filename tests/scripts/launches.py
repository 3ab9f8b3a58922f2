"""One script of `tests/scripts` under `distributed train` and under torchrun, and what each launch left."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.conftest import clean_environ, cli
from tests.template import SOCKET
from tests.warm_python import SCRIPTS

FOLDER = Path(__file__).parent
_RANK = (str(FOLDER / "torchrun_rank.py"),)
_LOSS = re.compile(r"\bloss (-?\d[\d.]*(?:e[-+]\d+)?|nan|inf)")
_EVENTS = re.compile(r"(events\.out\.tfevents)\..*")
_TIME = re.compile(r"/\d{10}\.\d+/")
_TIMEOUT_S = 600  # a launch of a soak test imports torch in each of its processes, on a machine that may be busy
_CUT = f"ended by the test after {_TIMEOUT_S} s"
_CRASHED = re.compile(rf"exitcode\s*: -(?:6|11)\b|{_CUT}")


@dataclass(frozen=True)
class Script:
    """A script and what may differ: below `FOLDER`, a file, or a folder and what in it is run."""

    path: str
    runs: tuple[tuple[str, ...], ...] = ((),)  # the arguments of each launch, one after the other in one folder
    run: str = ""  # in a folder, the file that is run
    ranks: int = 2
    codes: tuple[int, int] = (0, 0)  # ours, torchrun's, which is 1 whatever a rank ended with
    by_size: tuple[str, ...] = ()  # files whose content has times or addresses in it
    by_name: tuple[str, ...] = ()  # files whose content has the folder in it, or seconds

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py")

    def copied(self, folder: Path) -> Path:
        """The script's own files in a fresh folder, from which it is launched."""
        source = FOLDER / self.path
        if source.is_dir():
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(parents=True)
            shutil.copy(source, folder)
        return folder

    @property
    def command(self) -> str:
        return self.run or Path(self.path).name


@dataclass(frozen=True)
class Outcome:
    """What a user sees of launches: exit codes, losses and the files that are there afterwards."""

    codes: tuple[int, ...]
    losses: tuple[str, ...]
    files: dict[str, str]
    output: str

    @property
    def has_crashed(self) -> bool:
        """Whether torchrun has told of a rank that was aborted, or has not ended."""
        return _CRASHED.search(self.output) is not None


Ended = subprocess.CompletedProcess[str]
Launch = Callable[[Script, Path, tuple[str, ...]], Ended]


def outcome(script: Script, folder: Path, launch: Launch) -> Outcome:
    """All launches of a script in a folder of its own."""
    script.copied(folder)
    brought = set(folder.rglob("*"))
    ended = [launch(script, folder, arguments) for arguments in script.runs]
    losses = sorted(found for each in ended for found in _LOSS.findall(each.stdout))
    left = [
        path for path in folder.rglob("*") if path.is_file() and path not in brought and "__pycache__" not in path.parts
    ]
    files = {_name(path.relative_to(folder)): _content(path, script) for path in sorted(left)}
    output = "\n".join(f"{each.stdout}\n{each.stderr}" for each in ended)
    return Outcome(tuple(each.returncode for each in ended), tuple(losses), files, output)


def _name(path: Path) -> str:
    """Without the time, host and process that TensorBoard puts into a name."""
    return _TIME.sub("/time/", _EVENTS.sub(r"\1", path.as_posix()))


def _content(path: Path, script: Script) -> str:
    data = path.read_bytes()
    if path.name in script.by_name:
        return "is there" if data else "is empty"
    if any(fnmatch(path.name, pattern) for pattern in script.by_size):
        return f"{len(data)} bytes"
    return hashlib.sha256(data).hexdigest()


def ours(script: Script, folder: Path, arguments: tuple[str, ...]) -> Ended:
    """`distributed train` as users start it: a process of its own, and a warm parent of its own."""
    command = [sys.executable, "-m", "distributed.cli", *_ours(script, folder, arguments)]
    return _run(command, folder)


def torchrun(script: Script, folder: Path, arguments: tuple[str, ...]) -> Ended:
    command = [sys.executable, *_torchrun(script), *_RANK, script.command, *arguments]
    return _run(command, folder)


def ours_warm(script: Script, folder: Path, arguments: tuple[str, ...]) -> Ended:
    """The same from processes that have imported torch."""
    return cli(folder, *_ours(script, folder, arguments), OMP_NUM_THREADS="1")


def torchrun_warm(script: Script, folder: Path, arguments: tuple[str, ...]) -> Ended:
    """The same: its agent and its ranks are forks of a process that has imported torch."""
    command = [
        *SCRIPTS.command,
        *_torchrun(script),
        "--no-python",
        *SCRIPTS.command,
        *_RANK,
        script.command,
        *arguments,
    ]
    return _run(command, folder)


def _ours(script: Script, folder: Path, arguments: tuple[str, ...]) -> list[str]:
    run_dir = folder.parent / f"{folder.name}-runs" / str(len(arguments))
    settings = ["train", "--script", script.command, "--num-gpus", str(script.ranks), "--device", "cpu"]
    return [*settings, "--run-dir", str(_fresh(run_dir)), "--", *arguments]


def _fresh(folder: Path) -> Path:
    number = 0
    while (place := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return place


def _torchrun(script: Script) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(script.ranks)]


def _run(command: list[str], folder: Path) -> Ended:
    environ = clean_environ(OMP_NUM_THREADS="1")
    environ.pop(SOCKET)
    files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = subprocess.Popen(command, cwd=folder, env=environ, text=True, **files)
    try:
        out, err = started.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        started.terminate()  # a launcher ends its ranks
        out, err = started.communicate()
        err += f"\n{_CUT}"
    return subprocess.CompletedProcess(command, started.returncode, out, err)
