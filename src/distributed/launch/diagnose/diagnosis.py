"""Diagnosis: which rank failed first, by which known cause, and what to do; with the lines that show it.

    lines of all ranks ──▶ findings (a line that shows a cause) ──▶ the first of them ──▶ Diagnosis
    written failures   ──▶

A cause comes before a symptom, a symptom before a consequence; among equals the rank that those who watched call the
first, then what a rank ended with, then the earliest. What is not known is said to be unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distributed.launch.diagnose.causes import TIERS, UNKNOWN, Cause, cause_of_signal, causes_of
from distributed.launch.diagnose.lines import LogLine
from distributed.launch.diagnose.sources import Reported, RunRemains, gather
from distributed.launch.diagnose.tracebacks import Traceback, tracebacks
from distributed.launch.diagnose.watchdog import Waits, find_missing

_NEAR_END = 200  # lines: what stands further up was mostly survived
_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode)\s*: (.+)$")
_SIGNAL = re.compile(r"(?:exitcode ?: ?-|Signal |exited with code 1(?=\d\d\b))(\d+)")


@dataclass(frozen=True)
class ShownCause:
    """A line that shows a cause."""

    cause: Cause
    line: LogLine
    where: str = ""  # the user's line that it came from
    message: str = ""
    is_final: bool = False  # the rank ended with it
    is_named: bool = False  # those who watched say that this rank failed first

    @property
    def order(self) -> tuple[object, ...]:
        line = self.line
        time = line.time or (99, 0, 0, 0, 0.0)
        rank = math.inf if line.rank is None else line.rank
        is_unknown = self.cause is UNKNOWN
        return TIERS.index(self.cause.tier), is_unknown, not self.is_named, not self.is_final, time, rank, line.number


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a failure; without `first`, nothing that looks like one was found."""

    root: Path
    first: ShownCause | None
    also: Sequence[tuple[Cause, Sequence[int]]] = ()  # what other ranks show
    notes: Sequence[str] = field(default=())
    survived: Sequence[str] = ()  # faults that the run has recovered from
    has_ended_well: bool = False
    files: int = 0
    unread: Sequence[Path] = ()


def diagnose(path: Path) -> Diagnosis:
    """Read what is at a path, and say why it failed. Raises ConfigError where there is nothing to read."""
    return conclude(gather(path))


def conclude(evidence: RunRemains) -> Diagnosis:
    """The diagnosis of what was read."""
    root = _root_cause(evidence)
    named = evidence.first_rank if evidence.first_rank is not None else (root.rank if root is not None else None)
    found = [*_of_reports(evidence, named), *_of_lines(evidence, named)]
    if root is not None and not any(finding.line.rank == root.rank for finding in found):
        found.append(ShownCause(_of_exit(root) or UNKNOWN, root, message=root.text, is_named=True))
    found.sort(key=lambda finding: finding.order)
    waits = find_missing(evidence.lines)
    first = _blamed(found, waits, root) if found and not evidence.has_ended_well else None
    return Diagnosis(
        evidence.root,
        first,
        also=_also(found, first),
        notes=[*_stalls(evidence), *waits.notes],
        survived=[
            f"attempt {ended.attempt} ended after step {ended.step} ({ended.cause}): {ended.message.splitlines()[0]}"
            for ended in evidence.attempts
            if ended.message
        ],
        has_ended_well=evidence.has_ended_well,
        files=evidence.files,
        unread=evidence.unread,
    )


def _blamed(found: Sequence[ShownCause], waits: Waits, root: LogLine | None) -> ShownCause:
    """The first finding, with what others know of it: its rank, and the line of the user's that the rank ended in."""
    first = found[0]
    if first.line.rank is None and root is not None and first.line.path == root.path:
        first = replace(first, line=replace(first.line, rank=root.rank, host=root.host))
    if first.cause.name == "collective-timeout" and len(waits.missing) == 1 and first.line.rank not in waits.missing:
        first = replace(first, line=replace(first.line, rank=waits.missing[0], host=""), message=first.line.text)
    own = (other.where for other in found if other.line.rank == first.line.rank and other.is_final and other.where)
    return first if first.where else replace(first, where=next(own, ""))


def _of_reports(evidence: RunRemains, named: int | None) -> Iterator[ShownCause]:
    """The failures that were written down. What a rank says of itself is its end."""
    for report in evidence.reported:
        rank = report.rank if report.rank >= 0 else None
        text = report.message.strip()
        line = LogLine(report.path, 0, text.partition("\n")[0], rank, report.host, report.time)
        cause = _cause_of_report(report)
        where = next((found.where for found in _read(report.traceback, line) if found.where), "")
        yield ShownCause(cause, line, where, text, is_final=True, is_named=rank is not None and rank == named)


def _cause_of_report(report: Reported) -> Cause:
    causes = _causes_in(report.message)
    if report.is_collateral:
        return next((cause for cause in causes if cause.tier != "cause"), None) or _peer_lost()
    return _strongest(causes) or (cause_of_signal(-report.exit_code) if report.exit_code < 0 else None) or UNKNOWN


def _peer_lost() -> Cause:
    return next(iter(causes_of("Connection closed by peer")))


def _read(text: str, line: LogLine) -> list[Traceback]:
    lines = [LogLine(line.path, 0, part, line.rank) for part in text.splitlines()]
    return list(tracebacks(lines))


def _of_lines(evidence: RunRemains, named: int | None) -> Iterator[ShownCause]:
    for rank, lines in evidence.lines.items():
        is_named = rank is not None and rank == named
        errors = list(tracebacks(lines))
        places = {id(line): at for at, line in enumerate(lines)}
        final = _final(errors, places)
        ends_at = places[id(final.error)] if final is not None else len(lines) - 1
        inside = {id(error.error) for error in errors}
        for error in errors:
            is_final = error is final
            cause = _cause_of(error)
            if is_final or cause is not UNKNOWN:
                yield ShownCause(cause, error.error, error.where, error.message, is_final, is_named)
        for at, line in enumerate(lines):
            if id(line) in inside:
                continue
            for cause in causes_of(line.text):
                if cause.name not in ("script-error", "module-missing", "file-missing"):  # count in tracebacks alone
                    is_near = at >= ends_at - _NEAR_END
                    yield ShownCause(cause, line, message=line.text, is_final=is_near, is_named=is_named)


def _final(errors: Sequence[Traceback], places: Mapping[int, int]) -> Traceback | None:
    """The error that ended a rank: of the last that are no consequence, the one that was raised first.

    `places`: of lines among those that were read, by their ids. In the end of a long log they have no numbers.
    """
    if not errors:
        return None
    *_, last = found = [error.error.number or places[id(error.error)] for error in errors]
    late = [error for error, at in zip(errors, found, strict=True) if at > last - 2 * _NEAR_END]
    return min(late, key=lambda error: (TIERS.index(_cause_of(error).tier), late.index(error)))


def _cause_of(error: Traceback) -> Cause:
    return _strongest(_causes_in(error.message)) or UNKNOWN


def _causes_in(message: str) -> list[Cause]:
    return [cause for line in message.splitlines() for cause in causes_of(line)]


def _strongest(causes: Sequence[Cause]) -> Cause | None:
    """A cause before a symptom, a symptom before a consequence."""
    return min(causes, key=lambda cause: TIERS.index(cause.tier), default=None)


def _root_cause(evidence: RunRemains) -> LogLine | None:
    """The rank that torchrun calls the root cause."""
    for lines in evidence.lines.values():
        for at, line in enumerate(lines):
            if _ROOT.search(line.text):
                block = [part.text for part in lines[at : at + 9]]
                fields = {m[1]: m[2] for text in block if (m := _FIELD.match(text))}
                number = re.match(r"\d+", fields.get("rank", ""))
                rank = int(number[0]) if number else None
                text = next((part for part in block if "Signal" in part), f"exitcode  : {fields.get('exitcode', '')}")
                return LogLine(line.path, line.number, text.strip(), rank, fields.get("host", ""))
    return None


def _of_exit(line: LogLine) -> Cause | None:
    found = _SIGNAL.search(line.text)
    return cause_of_signal(int(found[1])) if found is not None else None


def _also(found: Sequence[ShownCause], first: ShownCause | None) -> list[tuple[Cause, list[int]]]:
    """By cause, the other ranks that show it."""
    ranks: dict[str, tuple[Cause, set[int]]] = {}
    for finding in found:
        rank = finding.line.rank
        if rank is None or (first is not None and rank == first.line.rank):
            continue
        if finding.is_final and finding.cause is not UNKNOWN:
            ranks.setdefault(finding.cause.name, (finding.cause, set()))[1].add(rank)
    return [(cause, sorted(those)) for cause, those in ranks.values()]


def _stalls(evidence: RunRemains) -> list[str]:
    return [
        f"rank {stall.rank} on {stall.host} made no step after step {stall.step}: it stood in {stall.where}"
        for stall in evidence.stalled[-3:]
    ]
