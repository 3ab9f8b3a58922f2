"""The known causes of failed runs, from causes.toml: the lines that show each of them, and what to do."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Literal

Tier = Literal["cause", "symptom", "consequence"]
TIERS: tuple[Tier, ...] = ("cause", "symptom", "consequence")


@dataclass(frozen=True)
class Cause:
    """One known cause."""

    name: str
    title: str  # a clause: "a GPU ran out of memory"
    signs: tuple[str, ...]  # patterns of lines that show it
    do: tuple[str, ...]
    tier: Tier = "cause"
    signals: tuple[int, ...] = field(default=())  # that end a rank which has left no line

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{sign})" for sign in self.signs) or r"(?!)", re.IGNORECASE)


UNKNOWN = Cause(
    "unknown",
    "not one of the known causes",
    (),
    ("read the traceback, and the lines before it in the log that is named above",),
)


@cache
def known_causes() -> tuple[Cause, ...]:
    """The table, in its order."""
    table = tomllib.loads(files(__package__).joinpath("causes.toml").read_text(encoding="utf-8"))
    return tuple(
        Cause(
            name,
            entry["title"],
            tuple(entry["signs"]),
            tuple(entry["do"]),
            entry.get("tier", "cause"),
            tuple(entry.get("signals", ())),
        )
        for name, entry in table.items()
    )


# Cheap, and true of every line that a cause can match: most lines of a log are passed over by it.
_WORTH_A_LOOK = re.compile(
    r"error|fail|exce|kill|signal|xid|nan|inf|oom|memory|space|quota|denied|timed? ?out|timeout|refused|unreach|"
    r"no route|assert|mismatch|incompat|driver|nccl|warn|abort|fault|corrupt|damaged|missing|unexpected|not |no |"
    r"cancel|preempt|disrupt|evict|spot|terminat|closed|reset|broken|duplicate|address|too many|cannot|can't|unable|"
    r"differ|twice|grad|token|usage|enospc|bus|stack|shape|size|retries|deadline|walltime|minimum|only|forward",
    re.IGNORECASE,
)


def causes_of(line: str) -> Iterator[Cause]:
    """The causes that a line shows, in the order of the table.

    >>> [cause.name for cause in causes_of("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")]
    ['gpu-out-of-memory']
    """
    if _WORTH_A_LOOK.search(line):
        yield from (cause for cause in known_causes() if cause.pattern.search(line))


def cause_of_signal(number: int) -> Cause | None:
    """The cause that a signal alone suggests."""
    return next((cause for cause in known_causes() if number in cause.signals), None)
