"""What there is to read: a run directory of ours, a folder of somebody else's logs, or one file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distributed.core.errors import ConfigError
from distributed.core.events import AttemptEnded, Event, EventTail, RankFailed, RankStalled, RunEnded
from distributed.core.protocol.failure import FailureRecord
from distributed.core.run_dir import AttemptDir, RunDir
from distributed.launch.diagnose.lines import LogLine, Moment, read_lines

_LOG = re.compile(r"(\.(log|out|err|txt)|^std(out|err)|^dmesg|^syslog|^messages)[\w.-]*$", re.IGNORECASE)
_RANK = re.compile(
    r"(?:rank|worker|proc|node-?rank)[-_ ]?(\d+)|(?:^|[-_.])(\d{1,5})\.(?:log|out|err|txt)$", re.IGNORECASE
)
_ELASTIC = re.compile(r"attempt_(\d+)[/\\](\d+)[/\\]")  # torchrun's --log-dir
_MOST_FILES = 20_000


@dataclass(frozen=True)
class Reported:
    """A failure that somebody has written down: a rank itself, its launcher, or torch elastic."""

    rank: int
    message: str
    traceback: str = ""
    host: str = ""
    time: Moment | None = None
    path: Path = Path()
    exit_code: int = 1
    is_collateral: bool = False


@dataclass(frozen=True)
class RunRemains:
    """All that was found in one place."""

    root: Path
    lines: dict[int | None, list[LogLine]]  # by rank; None: of no rank that is known
    reported: Sequence[Reported] = ()
    first_rank: int | None = None  # that failed first, by those who watched
    attempts: Sequence[AttemptEnded] = ()  # the faults that the run has survived, or tried to
    stalled: Sequence[RankStalled] = ()
    has_ended_well: bool = False
    files: int = 0
    unread: Sequence[Path] = field(default=())  # that could not be opened


def gather(path: Path) -> RunRemains:
    """The evidence at a path."""
    if not path.exists():
        raise ConfigError(f"there is nothing at {path}", do="name a run directory, a folder of logs, or a log")
    run = RunDir(path)
    if path.is_dir() and (run.events.exists() or run.attempts.is_dir()):
        return _of_run(run)
    files = [path] if path.is_file() else _logs_below(path)
    if not files:
        raise ConfigError(f"there are no logs in {path}", why="no file there ends in .log, .out, .err or .txt")
    reported = [found for file in _error_files(path) if (found := _elastic_error(file)) is not None]
    return _evidence(path, [(file, rank_of(file, path)) for file in files], reported=reported)


def _of_run(run: RunDir) -> RunRemains:
    events = EventTail(run.events, from_end=False).read() if run.events.exists() else []
    failed = next((event for event in reversed(events) if isinstance(event, RankFailed)), None)
    numbers = run.attempt_numbers()
    attempts = [run.attempt(number) for number in numbers]
    logs = _latest_logs(attempts)
    named = _inside(run.path, failed.log_path) if failed is not None else None
    if named is not None and failed is not None:
        logs[failed.rank] = named
    ended = next((event for event in reversed(events) if isinstance(event, RunEnded | RankFailed)), None)
    reported = [_own(record, attempts[-1].failure(record.rank)) for record in _records(attempts[-1:])]
    if failed is not None and not any(report.rank == failed.rank for report in reported):
        reported.append(
            Reported(failed.rank, failed.message, host=failed.host, time=_moment(failed.time), path=named or run.events)
        )
    beside = [file for file in sorted(run.path.iterdir()) if file.is_file() and _LOG.search(file.name)]
    return _evidence(
        run.path,
        [*((path, rank) for rank, path in sorted(logs.items())), *((file, None) for file in beside)],
        reported=reported,
        first_rank=failed.rank if failed is not None and failed.rank >= 0 else None,
        events=events,
        has_ended_well=isinstance(ended, RunEnded) and ended.status == "done",
    )


def _evidence(
    root: Path,
    files: Sequence[tuple[Path, int | None]],
    *,
    reported: Sequence[Reported],
    first_rank: int | None = None,
    events: Sequence[Event] = (),
    has_ended_well: bool = False,
) -> RunRemains:
    lines: dict[int | None, list[LogLine]] = {}
    unread = []
    for path, rank in files:
        if not path.is_file():  # a pipe, which has no end, or a link to nothing
            unread.append(path)
            continue
        try:
            for line in read_lines(path, rank):
                lines.setdefault(line.rank, []).append(line)
        except OSError:
            unread.append(path)
    return RunRemains(
        root,
        lines,
        reported,
        first_rank,
        attempts=[event for event in events if isinstance(event, AttemptEnded)],
        stalled=[event for event in events if isinstance(event, RankStalled)],
        has_ended_well=has_ended_well,
        files=len(files),
        unread=unread,
    )


def _latest_logs(attempts: Sequence[AttemptDir]) -> dict[int, Path]:
    """The newest log of each rank: one that survives into an attempt keeps its log."""
    found: dict[int, Path] = {}
    for attempt in attempts:
        for path in attempt.logs():
            number = path.stem.removeprefix("rank-")
            if number.isdigit():
                found[int(number)] = path
    return found


def _records(attempts: Sequence[AttemptDir]) -> list[FailureRecord]:
    found = []
    for attempt in attempts:
        for path in attempt.failures():
            try:
                record = FailureRecord.read(path)
            except (ValueError, TypeError):
                continue  # torn, or of another version: the logs are left
            if record is not None:
                found.append(record)
    return found


def _own(record: FailureRecord, path: Path) -> Reported:
    return Reported(
        record.rank,
        f"{record.type}: {record.message}",
        record.traceback,
        host=record.host,
        time=_moment(record.time),
        path=path,
        exit_code=record.exit_code,
        is_collateral=record.collateral,
    )


def _elastic_error(path: Path) -> Reported | None:
    """What torch's `@record` has written: error.json."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        message = content["message"]
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        text = str(message["message"] if isinstance(message, dict) else message)
        stamp = float(extra.get("timestamp", 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    found = _ELASTIC.search(str(path))
    rank = int(found[2]) if found else -1
    return Reported(rank, text, str(extra.get("py_callstack", "")), time=_moment(stamp) if stamp else None, path=path)


def _error_files(path: Path) -> list[Path]:
    return sorted(path.rglob("error.json"))[:_MOST_FILES] if path.is_dir() else []


def _logs_below(folder: Path) -> list[Path]:
    """All logs in a folder; those of torchrun's last attempt alone."""
    found = []
    for place, _, names in os.walk(folder):
        found += [Path(place) / name for name in sorted(names) if _LOG.search(name)]
        if len(found) > _MOST_FILES:
            raise ConfigError(f"{folder} has more than {_MOST_FILES:,} logs", do="name the folder of one run")
    attempts = [int(match[1]) for path in found if (match := _ELASTIC.search(str(path))) is not None]
    last = f"attempt_{max(attempts)}{os.sep}" if attempts else ""
    return [path for path in found if not _ELASTIC.search(str(path)) or last in str(path)]


def rank_of(path: Path, root: Path = Path()) -> int | None:
    """Whose log a file is, by its name.

    >>> [rank_of(Path(name)) for name in ("rank-3.log", "run/attempt_0/2/stderr.log", "worker_7.err", "slurm-81.out")]
    [3, 2, 7, None]
    """
    elastic = _ELASTIC.search(path.as_posix())
    if elastic is not None:
        return int(elastic[2])
    if re.match(r"slurm-\d+\.", path.name) or path == root:
        return None
    found = _RANK.search(path.name)
    return int(found[1] or found[2]) if found is not None else None


def _inside(folder: Path, path: str) -> Path | None:
    """A log by the path that an event has of it, also where the run directory was moved since."""
    if not path:
        return None
    given = Path(path)
    moved = RunDir(folder).attempts / given.parent.name / given.name
    return next((found for found in (moved, given) if found.is_file()), None)


def _moment(seconds: float) -> Moment:
    time = datetime.fromtimestamp(seconds, UTC).astimezone()
    return time.month, time.day, time.hour, time.minute, time.second + time.microsecond / 1e6
