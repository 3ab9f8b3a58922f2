"""Lines of logs: which rank wrote each, on which host, and when, in the prefixes of many launchers.

[r3] …   [rank3]: …   [default3]:…   3: …   [1,3]<stderr>:…        ours, torch, torchrun --tee, srun -l, mpirun
(RayTrainWorker pid=7, ip=10.0.0.2) …                             Ray
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEAD_BYTES, _TAIL_BYTES = 1 << 18, 1 << 23  # of a log: what a run began with, and what it ended with
_LONGEST = 4_096  # characters of a line that are looked at: a pattern can take the square of them
_PREFIX = re.compile(
    r"^\s*(?:"
    r"\[(?:r|rank ?|default)(?P<tagged>\d+)\]:?"
    r"|\[\d+,(?P<mpi>\d+)\]<std\w+>:"
    r"|(?P<srun>\d{1,5}):(?= )"
    r"|\((?P<actor>[\w.]+) (?:rank=(?P<ray>\d+)|pid=\d+(?:, ip=(?P<host>[\w.:-]+))?)\)"
    r") ?"
)
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d+)?)"
_TIMES = (
    # 2024-03-05 10:11:12,345  2024-03-05T10:11:12.345  2024-03-05_10:11:12
    re.compile(rf"\b20\d\d-(?P<month>\d\d)-(?P<day>\d\d)[ T_]{_CLOCK}"),
    # E0305 10:11:12.345678 of glog, E321 02:07:08.408271257 of torch
    re.compile(rf"\b[IWEF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}"),
    # Mar  5 10:11:12 of syslog
    re.compile(rf"^(?P<name>[A-Z][a-z]{{2}}) +(?P<day>\d{{1,2}}) {_CLOCK}"),
)
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
# Colours and the like, titles of windows, and what is left of control characters: a log must not steer a terminal.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f\x9b\x9d]")

Moment = tuple[int, int, int, int, float]  # month, day, hour, minute, second: not all logs have a year


@dataclass(frozen=True)
class LogLine:
    """One line of a log."""

    path: Path
    number: int  # from 1; 0 where the beginning of a long log was passed over
    text: str  # without the launcher's prefix
    rank: int | None = None
    host: str = ""
    time: Moment | None = None

    @property
    def place(self) -> str:
        return f"{self.path}:{self.number}" if self.number else str(self.path)


def read_lines(path: Path, rank: int | None = None, host: str = "") -> Iterator[LogLine]:
    """The lines of a log, of a very long one its beginning and its end. `rank`: whose log it is, if one rank's."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _HEAD_BYTES + _TAIL_BYTES:
            yield from _lines(path, file.read(), 1, rank, host)
            return
        yield from _lines(path, file.read(_HEAD_BYTES), 1, rank, host)
        file.seek(size - _TAIL_BYTES)
        yield from _lines(path, file.read(), 0, rank, host)


def _lines(path: Path, content: bytes, first: int, rank: int | None, host: str) -> Iterator[LogLine]:
    for number, raw in enumerate(content.split(b"\n"), first):
        *_, shown = raw.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)  # of a progress bar, its last state
        text = without_controls(shown)
        if text.strip():
            yield parse_line(_shortened(text), path, number if first else 0, rank, host)


def without_controls(text: str) -> str:
    """
    >>> without_controls("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07end\\n")
    'red end\\n'
    """
    return _ESCAPES.sub("", text)


def _shortened(text: str) -> str:
    """A line with its beginning and its end, where the error is that a dump of a megabyte is about."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"


def parse_line(text: str, path: Path, number: int, rank: int | None = None, host: str = "") -> LogLine:
    """
    >>> line = parse_line("[rank3]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] timeout", Path("x"), 1)
    >>> line.rank, line.time
    (3, (3, 21, 2, 7, 8.4))
    """
    prefix = _PREFIX.match(text)
    if prefix is not None:
        found = next((prefix[name] for name in ("tagged", "mpi", "srun", "ray") if prefix[name] is not None), None)
        if found is not None and rank is None:
            rank = int(found)
        host = prefix["host"] or host
        text = text[prefix.end() :]
    return LogLine(path, number, text, rank, host, moment_of(text))


def moment_of(text: str) -> Moment | None:
    """When a line was written, if it says so near its beginning.

    >>> moment_of("[2024-03-05 10:11:12,345] step 3"), moment_of("Mar  5 10:11:12 node7 kernel: NVRM")
    ((3, 5, 10, 11, 12.345), (3, 5, 10, 11, 12.0))
    """
    for pattern in _TIMES:
        found = pattern.search(text[:80])
        if found is not None:
            parts = found.groupdict()
            name = parts.get("name")
            if name is not None and name not in _MONTHS:
                continue
            month = _MONTHS.index(name) + 1 if name else int(parts["month"])
            second = float(parts["second"].replace(",", "."))
            return month, int(parts["day"]), int(parts["hour"]), int(parts["minute"]), second
    return None
