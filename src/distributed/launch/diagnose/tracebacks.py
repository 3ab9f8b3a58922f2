"""Tracebacks of Python in a rank's lines: the error that came first, and the user's line that it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distributed.launch.diagnose.lines import LogLine

_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$')
_ERROR = re.compile(
    r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Stop\w*|[A-Z]\w*))(?::|$)"
)
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python3|/bin/\w+$|<frozen |<string>|/distributed/(launch|train|worker|trainers)"
)
_MOST_LINES = 400  # of one traceback


@dataclass(frozen=True)
class Traceback:
    """One traceback: its error's line, the rest of the message, and the last frame of the user's own code."""

    error: LogLine
    message: str
    where: str  # "train.py:31 in forward"; "" if no frame is the user's


def tracebacks(lines: Sequence[LogLine]) -> Iterator[Traceback]:
    """Those of one rank, in their order. One that Python only prints in passing (`Exception ignored in`) is none."""
    number = 0
    while number < len(lines):
        if not lines[number].text.rstrip().endswith(_BEGIN):
            number += 1
            continue
        before = lines[number - 1].text if number else ""
        number, found = _read(lines, number + 1)
        if found is not None and "Exception ignored in" not in before and "--- Logging error ---" not in before:
            yield found


def _read(lines: Sequence[LogLine], number: int) -> tuple[int, Traceback | None]:
    where = ""
    for at in range(number, min(len(lines), number + _MOST_LINES)):
        text = lines[at].text
        frame = _FRAME.match(text)
        if frame is not None and not _LIBRARY.search(frame["file"]):
            where = f"{frame['file']}:{frame['line']} in {frame['name']}"
        if _ERROR.match(text):
            rest = [line.text for line in lines[at + 1 : at + 12]]
            stop = next(
                (i for i, text in enumerate(rest) if text.rstrip().endswith(_BEGIN) or _is_chain(text)), len(rest)
            )
            return at + 1, Traceback(lines[at], "\n".join([text, *rest[:stop]]), where)
        if text.rstrip().endswith(_BEGIN):
            return at, None
    return number, None


def _is_chain(text: str) -> bool:
    return "During handling of the above exception" in text or "direct cause of the following exception" in text
