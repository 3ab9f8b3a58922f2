"""Calls: what this rank has called in a group, and how that is told to peers that wait for it."""

from __future__ import annotations

import inspect
import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from distributed.core.errors import first_of

_REMEMBERED = 16  # calls of a rank: a source of broadcasts may be some ahead of those that wait for it
_MOST_RANKS = 8  # that one message describes

What = tuple[Any, ...]  # operation, dtype, shape and whatever else must be the same on all ranks


@dataclass(slots=True)
class CollectiveCall:
    """One call of a collective: which, from where, and until when the others may come."""

    operation: str
    name: str  # the caller's; "" where it gave none
    where: tuple[CodeType, int]
    number: int  # of this group's calls, from 1; of a message, of those between the two ranks
    what: What
    timeout_s: float
    until: float
    is_bounded: bool  # whether the caller gave this deadline

    @property
    def place(self) -> str:
        code, line = self.where
        return f"{Path(code.co_filename).name}:{line}"

    @property
    def label(self) -> str:
        """For a heartbeat."""
        return self.name or f"{self.operation} at {self.place}"

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"{self.operation}{name} (call {self.number}, {self.place})"


def caller() -> tuple[CodeType, int]:
    """The line that called the function that calls this."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame is not None else None
    assert frame is not None
    return frame.f_code, frame.f_lineno


def describe(what: What) -> str:
    """
    >>> import torch
    >>> describe(("all_reduce", "sum", torch.float32, torch.Size([3, 4])))
    'all_reduce sum float32 [3, 4]'
    """
    words = (str(list(part)) if isinstance(part, tuple) else str(part).removeprefix("torch.") for part in what)
    return " ".join(word for word in words if word)


class CallRecord:
    """Those of one rank in one group, in their order."""

    def __init__(self) -> None:
        self.begun = 0
        self.waiting: CollectiveCall | None = None
        self._recent: deque[CollectiveCall] = deque(maxlen=_REMEMBERED)

    def begin(self, call: CollectiveCall) -> None:
        self.begun = call.number
        self._recent.append(call)

    def standing(self) -> dict[str, Any]:
        """For peers, as JSON."""
        waiting = self.waiting
        recent = [(call.number, str(call), describe(call.what)) for call in tuple(self._recent)]
        return {"begun": self.begun, "waiting": "" if waiting is None else str(waiting), "recent": recent}


@dataclass(frozen=True)
class Standing:
    """Where a peer stands in a group."""

    begun: int = 0
    waiting: str = ""
    recent: Mapping[int, tuple[str, str]] = field(default_factory=dict)  # number: the call and what it is about

    @classmethod
    def read(cls, told: dict[str, Any]) -> Standing:
        recent = {number: (call, what) for number, call, what in told["recent"]}
        return cls(told["begun"], told["waiting"], recent)

    def differs(self, number: int, what: str) -> str:
        """What it has called under this number, if that is something else; else nothing."""
        call, theirs = self.recent.get(number, ("", what))
        return "" if theirs == what else f"{call} of {theirs}"


SILENT = "does not answer: it has been killed or is stopped"
ABSENT = "has called nothing of distributed.comm yet"
LEFT = "has left: its process has ended"


def missing(call: CollectiveCall, standings: Mapping[int, Standing | str], *, is_message: bool = False) -> list[str]:
    """A sentence for each rank that has not joined a call; a text instead of a standing is such a sentence.

    >>> import sys, types
    >>> where = (missing.__code__, 31)
    >>> call = CollectiveCall("all_reduce", "sum", where, 17, ("all_reduce",), 30.0, 0.0, False)
    >>> missing(call, {1: Standing(17, "", {17: ("…", "all_reduce")}), 2: Standing(16, "broadcast 'weights'"), 3: LEFT})
    ["rank 2 waits in broadcast 'weights'", 'rank 3 has left: its process has ended']
    """
    told = []
    for rank, standing in sorted(standings.items()):
        if isinstance(standing, str):
            told.append(f"rank {rank} {standing}")
        elif is_message or standing.begun < call.number:
            told.append(f"rank {rank} {_is_elsewhere(standing)}")
        elif differs := standing.differs(call.number, describe(call.what)):
            told.append(f"rank {rank} has called {differs} instead of {describe(call.what)}")
    return told


def _is_elsewhere(standing: Standing) -> str:
    if standing.waiting:
        return f"waits in {standing.waiting}"
    last = standing.recent.get(standing.begun)
    return "is in no collective" + (f"; its last was {last[0]}" if last else ", and has been in none here")


def explain(sentences: Iterable[str]) -> str:
    """Why a call has not ended, as far as its peers have told."""
    told = list(sentences)
    return first_of(told, _MOST_RANKS, between="; ") if told else "all ranks have joined it: what they send is slow"


def deadline(timeout_s: float) -> float:
    return time.monotonic() + timeout_s


def encode(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
