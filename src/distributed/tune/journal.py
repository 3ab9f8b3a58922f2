"""The journal of a search: each thing that happened as a line of trials.jsonl, forced to the disk before it counts.

A search that was killed is read back from it: finished trials stay finished, and running ones resume.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed.core.atomic import FILE_MODE, make_private
from distributed.core.errors import ConfigError, DistributedError
from distributed.tune.runner import Exploit, Mode, Report, SchedulerName, SearchName, TrialResult, TrialSpec
from distributed.tune.search_dir import SearchDir


@dataclass(frozen=True)
class Heading:
    """The settings of a search, which must be the same when it is resumed."""

    space: Mapping[str, Any]
    metric: str
    mode: Mode
    search: SearchName
    scheduler: SchedulerName
    seed: int
    num_samples: int
    engine: str = "local"
    script: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # that all trials of a script have


@dataclass(frozen=True)
class Past:
    """A search as its journal records it."""

    heading: Heading
    trials: tuple[TrialResult, ...] = ()
    seconds: float = 0.0
    read: frozenset[str] = field(default_factory=frozenset)


class Journal:
    """Appends. A line is a JSON object with its kind, so that later versions can add kinds.

    One process at a time has it: two that resume the same search would run every trial twice.
    """

    def __init__(self, run_dir: str) -> None:
        make_private(run_dir)
        self._handle = os.open(SearchDir(run_dir).journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
        try:
            _lock(self._handle, run_dir)
        except BaseException:
            os.close(self._handle)
            raise
        _mend(SearchDir(run_dir).journal)

    def began(self, heading: Heading) -> None:
        self._write("began", asdict(heading))

    def started(self, trial: TrialSpec) -> None:
        self._write("started", asdict(trial))

    def reported(self, report: Report) -> None:
        self._write("reported", asdict(report))

    def read(self, names: frozenset[str]) -> None:
        self._write("read", {"names": sorted(names)})

    def exploited(self, exploit: Exploit) -> None:
        self._write("exploited", asdict(exploit))

    def ended(self, result: TrialResult) -> None:
        own = {name: value for name, value in asdict(result).items() if name not in ("history", "lineage")}
        self._write("ended", own | {"takeovers": len(result.lineage)})
        os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)

    def _write(self, kind: str, content: Mapping[str, Any]) -> None:
        """One call, so that a reader sees whole lines but for the last of a machine that lost its power."""
        line = json.dumps({"kind": kind, **content}, separators=(",", ":"), default=list)
        os.write(self._handle, line.encode() + b"\n")


def _lock(handle: int, run_dir: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as held:
        raise ConfigError(
            f"another process is running the search in {run_dir}",
            why="two processes would run every remaining trial twice",
            do="wait for that process or end it, then resume; or set another run_dir",
        ) from held
    except OSError:
        pass  # a file system without locks


def _mend(path: Path) -> None:
    """A line that a killed writer left unfinished is ended, so that the next one is whole."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def holds_search(run_dir: str) -> bool:
    return SearchDir(run_dir).journal.exists()


def read_journal(run_dir: str) -> Past:
    """Everything that the search in this folder did."""
    path = SearchDir(run_dir).journal
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{run_dir} holds no search", why=f"{path}: {error.strerror}", do="name the run_dir of a `distributed tune`"
        ) from error
    heading: Heading | None = None
    trials: dict[str, TrialResult] = {}
    read: set[str] = set()
    for line in lines:
        try:
            content = json.loads(line)
            kind = content.pop("kind")
        except (ValueError, KeyError, AttributeError):  # the line that was being written when the machine went down
            continue
        if kind == "began":
            heading = Heading(**{name: value for name, value in content.items() if name in Heading.__annotations__})
        elif kind == "read":
            read |= set(content["names"])
        else:
            _apply(trials, kind, content)
    if heading is None:
        raise DistributedError(f"{path} is not the journal of a search", do="name the run_dir of a search")
    return Past(heading, tuple(trials[name] for name in sorted(trials)), read=frozenset(read))


def _apply(trials: dict[str, TrialResult], kind: str, content: dict[str, Any]) -> None:
    if kind == "started":
        name, params, failures = content["id"], content["params"], content.get("attempt", 0)
        known = trials.get(name) or TrialResult(name, params, "running", directory=content["directory"])
        trials[name] = replace(known, params=params, status="running", error="", failures=failures)
    elif kind == "reported":
        report = Report(**content)
        trial = trials[report.trial]
        earlier = tuple(r for r in trial.history if r.step < report.step)  # a trial that went back reports again
        checkpoint = report.checkpoint or trial.checkpoint
        trials[trial.id] = replace(
            trial,
            history=(*earlier, report),
            metrics=report.metrics,
            seconds=report.seconds,
            checkpoint=checkpoint,
        )
    elif kind == "exploited":
        exploit = Exploit(**content)
        trial = trials[exploit.trial]
        trials[trial.id] = replace(trial, params=exploit.params, lineage=(*trial.lineage, exploit))
    elif kind == "ended":
        trial = trials[content.pop("id")]
        lineage = trial.lineage[: content.pop("takeovers", None)]  # one that had no effect does not count
        trials[trial.id] = replace(trial, **content, lineage=lineage)
