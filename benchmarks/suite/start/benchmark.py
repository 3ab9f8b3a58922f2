"""Time to the first step: each engine that is installed, by the command that a user types, beside a start by hand.

A command is timed from the moment it is typed until rank 0 has made its first step, and until it is back. Engines and
the starts by hand are interleaved, so that what the machine does meanwhile falls on all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.suite.twins import starter
from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.bench.processes import ended_by_signals, kill_all, start_command
from distributed.core.engines.engine import ENGINES
from distributed.core.errors import ConfigError, LaunchError, Problem
from distributed.core.events import StepEnded, parse_event
from distributed.core.registry import is_installed, nearest_hint
from distributed.core.run_dir import RunDir

STAMP = "first-step"  # a file in which a start by hand writes the time of its first step
_STARTERS = {"torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={processes}")}
_SETTINGS = {"keras": ("tensorflow_strategy=multi_worker",)}  # for so many processes, as the others have
_TIMEOUT_S = 300.0
_TAIL_LINES = 15  # of what a command said, in an error

Notify = Callable[[str, int, int], None]  # (what goes on, done, in all)


class Start(NamedTuple):
    """What one command took."""

    first_step_s: float
    whole_s: float  # until the command was back


@dataclass(frozen=True)
class StartRow:
    """An engine, or who starts the same by hand; medians over the repeats."""

    name: str
    peer: str  # the row that it is compared with; "": it is one by hand
    starts: tuple[Start, ...]

    @property
    def first_step_s(self) -> float:
        return median(start.first_step_s for start in self.starts)

    @property
    def whole_s(self) -> float:
        return median(start.whole_s for start in self.starts)


@dataclass(frozen=True)
class Starts:
    """What the start benchmark found."""

    rows: tuple[StartRow, ...]
    missing: dict[str, str]  # engine → what installs it
    processes: int
    repeats: int
    load_before: float | None
    load_after: float | None

    def of_peer(self, row: StartRow) -> float | None:
        """An engine's time to the first step, over that of its peer; None for the peer itself."""
        peer = next((peer for peer in self.rows if peer.name == row.peer and not peer.peer), None)
        return None if peer is None else row.first_step_s / peer.first_step_s

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {
                "name": row.name,
                "peer": row.peer,
                "first_step_s": round(row.first_step_s, 3),
                "of_peer": self.of_peer(row),
                "whole_s": round(row.whole_s, 3),
                "starts": [_rounded(start) for start in row.starts],
            }
            for row in self.rows
        ]
        return {
            "benchmark": "start",
            "unit": "seconds from the command to the end of rank 0's first step, and to its own end (whole_s)",
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"processes": self.processes, "repeats": self.repeats, "device": "cpu"},
            "load_average": {"before": self.load_before, "after": self.load_after},
            "missing": self.missing,
            "rows": rows,
        }


def _rounded(start: Start) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in start._asdict().items()}


def find_engines(only: Sequence[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Those that are installed, and of the others what installs them; nothing is imported."""
    unknown = [name for name in only or () if name not in ENGINES.entries]
    if unknown:
        raise ConfigError(
            [Problem(f"there is no engine {name!r}", do=nearest_hint(name, ENGINES.entries)) for name in unknown]
        )
    asked = {name: engine for name, engine in ENGINES.entries.items() if not only or name in only}
    missing = {name: engine.brought_by for name, engine in asked.items() if not is_installed(engine.needs)}
    return [name for name in asked if name not in missing], missing


def measure_starts(
    only: Sequence[str] | None = None, *, processes: int, repeats: int, notify: Notify = lambda *_: None
) -> Starts:
    """Start every engine and every peer so many times, interleaved."""
    engines, missing = find_engines(only)
    peers = list(dict.fromkeys(starter(name) for name in engines))
    sides = [(name, starter(name)) for name in engines] + [(name, "") for name in peers]
    taken: dict[str, list[Start]] = {_key(name, peer): [] for name, peer in sides}
    load_before, done = load_average(), 0
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        for number in range(repeats):
            for name, peer in sides if number % 2 == 0 else sides[::-1]:
                by = "" if peer else " by hand"
                notify(f"{name}{by}: start {number + 1} of {repeats}", done, repeats * len(sides))
                where = os.path.join(folder, f"{_key(name, peer)}-{number}")
                taken[_key(name, peer)].append(time_start(name, processes, where, by_hand=not peer))
                done += 1
    notify("done", done, done)
    rows = tuple(StartRow(name, peer, tuple(taken[_key(name, peer)])) for name, peer in sides)
    return Starts(rows, missing, processes, repeats, load_before, load_average())


def _key(name: str, peer: str) -> str:
    return name if peer else f"by-hand-{name}"


def time_start(name: str, processes: int, folder: str, *, by_hand: bool = False) -> Start:
    """One command, from its start to its end."""
    os.makedirs(folder)
    run_dir, said = os.path.join(folder, "run"), os.path.join(folder, "output.log")
    command = _hand_command(name, processes, folder) if by_hand else _command(name, processes, folder, run_dir)
    with open(said, "wb") as output:
        began = time.time()  # the clock of events
        started = start_command(command, folder, output)
        try:
            code = started.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise _failed(name, f"has not ended after {_TIMEOUT_S:.0f} s", said) from None
        finally:
            kill_all(started)
        ended = time.time()
    if code:
        raise _failed(name, f"ended with exit code {code}", said)
    first = _stamped(folder) if by_hand else _first_step(run_dir)
    if first is None:
        raise _failed(name, "ended without a step", said)
    return Start(first - began, ended - began)


def _command(name: str, processes: int, folder: str, run_dir: str) -> list[str]:
    models = ENGINES.entries[name].models
    script = _copied(f"ours_{models}.py", folder)
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", script, "--backend", name]
    return [*command, "--num-gpus", str(processes), "--device", "cpu", "--run-dir", run_dir, *_SETTINGS.get(models, ())]


def _hand_command(peer: str, processes: int, folder: str) -> list[str]:
    script = _copied(f"by_hand_{peer}.py", folder)
    starter = [word.format(processes=processes) for word in _STARTERS.get(peer, ())]
    return [sys.executable, *starter, script, folder, str(processes)]


def _copied(file: str, folder: str) -> str:
    """A script in a folder of its own, as a user's has."""
    script = os.path.join(folder, "train.py")
    shutil.copy(Path(__file__).with_name(file), script)
    return script


def _first_step(run_dir: str) -> float | None:
    try:
        lines = RunDir(run_dir).events.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    events = (parse_event(line) for line in lines)
    return next((event.time for event in events if isinstance(event, StepEnded)), None)


def _stamped(folder: str) -> float | None:
    try:
        return float(Path(folder, STAMP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _failed(name: str, how: str, said: str) -> LaunchError:
    lines = Path(said).read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return LaunchError(
        f"the start of {name} {how}", why="\n".join(lines) or "it said nothing", do="leave it out: --only another"
    )
