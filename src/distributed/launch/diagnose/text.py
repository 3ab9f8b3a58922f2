"""A diagnosis as a person reads it, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distributed.core.secrets import mask_text
from distributed.launch.diagnose.causes import UNKNOWN, known_causes
from distributed.launch.diagnose.diagnosis import Diagnosis, ShownCause
from distributed.launch.diagnose.lines import without_controls
from distributed.launch.diagnose.watchdog import name_ranks

_LONGEST = 300


def to_text(diagnosis: Diagnosis) -> str:
    """The whole diagnosis; secrets are masked."""
    return mask_text(without_controls("\n".join(_lines(diagnosis))))


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """For programs: the same facts."""
    first = diagnosis.first
    found = None
    if first is not None:
        found = {
            "cause": first.cause.name,
            "title": first.cause.title,
            "tier": first.cause.tier,
            "rank": first.line.rank,
            "host": first.line.host,
            "time": _time(first),
            "log": first.line.place,
            "line": mask_text(first.line.text.strip()),
            "where": first.where,
            "do": list(first.cause.do),
        }
    return {
        "path": str(diagnosis.root),
        "ended_well": diagnosis.has_ended_well,
        "first": found,
        "also": [{"cause": cause.name, "ranks": list(ranks)} for cause, ranks in diagnosis.also],
        "notes": [mask_text(note) for note in diagnosis.notes],
        "survived": [mask_text(fault) for fault in diagnosis.survived],
        "files": diagnosis.files,
        "unread": list(map(str, diagnosis.unread)),
    }


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    first = diagnosis.first
    if diagnosis.has_ended_well:
        yield f"{diagnosis.root}: the run has ended well"
    elif first is None:
        yield f"{diagnosis.root}: no failure was found in {diagnosis.files} logs"
        yield f"  looked for {len(known_causes())} causes and for tracebacks: are these all of the logs?"
    else:
        yield from _of_first(first)
    for note in diagnosis.notes:
        yield f"note:     {note}"
    for cause, ranks in diagnosis.also if first is not None else ():
        yield f"also:     {name_ranks(ranks)}: {cause.title}"
    if diagnosis.survived:
        yield "faults of this run, in their order:"
        yield from (f"  {_short(fault)}" for fault in diagnosis.survived)
    for path in diagnosis.unread:
        yield f"could not be read: {path}"


def _of_first(first: ShownCause) -> Iterator[str]:
    line = first.line
    who = "a host" if line.rank is None else f"rank {line.rank}"
    on, when = f" on {line.host}" if line.host else "", _time(first)
    is_known = first.cause is not UNKNOWN
    how = {
        "symptom": "; that is a symptom, and nothing here says why",
        "consequence": "; the log of that rank is not here",
    }
    yield f"first:    {who}{on}{f' at {when}' if when else ''}"
    yield f"cause:    {first.cause.title}{how.get(first.cause.tier, '')}{f' [{first.cause.name}]' if is_known else ''}"
    yield f"shown by: {line.place}"
    message = [part for part in (first.message or line.text).splitlines() if part.strip()]
    yield from (f"          {_short(part)}" for part in message[:6])
    if first.where:
        yield f"where:    {first.where}"
    for number, do in enumerate(first.cause.do):
        yield f"{'do:' if number == 0 else '':<9} {do}"


def _time(first: ShownCause) -> str:
    if first.line.time is None:
        return ""
    month, day, hour, minute, second = first.line.time
    return f"{month:02}-{day:02} {hour:02}:{minute:02}:{int(second):02}"


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
