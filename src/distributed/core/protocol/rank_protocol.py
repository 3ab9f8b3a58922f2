"""What a launcher and its ranks say to each other while they run: JSON lines over a socket pair that a rank inherits.

A rank reports when it joins and when it has lost its world; the launcher sends it the next one.

The abort of one rank's NCCL communicators sends garbage to its peers, so where ranks have a step gate
(`runtime/step_gate.py`), all of them have closed it before the first one aborts:

    launcher                       rank
      │ ◀── Broke ───────────────── its world broke, as it notices; its gate is closed, and it waits
      │ ─── Close ────────────────▶ closes its gate
      │ ◀── Closed ────────────────
      │     (once all survivors have answered or ended)
      │ ─── Leave(in_order=False) ▶ aborts
      │ ◀── Lost ────────────────── nothing of that world runs on its device any more
      │ ─── World ────────────────▶ joins the next one
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, get_args

from distributed.core.env import WorkerEnv


@dataclass(frozen=True)
class Joined:
    """Rank to launcher: it runs our loop; `regroups`: it can continue in another world without a restart."""

    regroups: bool
    sizes: list[int] = field(default_factory=list)  # numbers of ranks that are legal; none: any
    in_run: bool = False  # until it says otherwise, an end of it is early, with any exit code
    is_done: bool = False  # its training has come to its end
    has_gate: bool = False  # it must be told `Close` before any rank of its world aborts


@dataclass(frozen=True)
class Broke:
    """Rank to launcher: it noticed that its world broke, takes no step any more and waits for `Leave`."""

    attempt: int
    message: str = ""


@dataclass(frozen=True)
class Closed:
    """Rank to launcher: no step of this attempt counts from here on."""

    attempt: int


@dataclass(frozen=True)
class Lost:
    """Rank to launcher: its world broke or was left; it waits for the next one."""

    attempt: int
    message: str = ""
    holds: bool = False  # the whole state of the run, as it was then


@dataclass(frozen=True)
class Slow:
    """Rank to launcher: the others have waited for it for longer than a new process in its place takes."""

    attempt: int
    message: str


@dataclass(frozen=True)
class Resumed:
    """Rank to launcher: the state that an attempt resumes from, reported by rank 0."""

    attempt: int
    step: int
    source: str  # "memory of rank 1", a checkpoint's path, or "the beginning"
    is_furthest: bool = False  # no device had come further, though hosts that run ahead of theirs had counted on


@dataclass(frozen=True)
class World:
    """Launcher to rank: continue in this world."""

    environ: dict[str, str]  # as `WorkerEnv.to_environ` has it


@dataclass(frozen=True)
class Close:
    """Launcher to rank: from here on no step of this attempt counts; answered with `Closed`."""

    attempt: int


@dataclass(frozen=True)
class Leave:
    """Launcher to rank: leave the world. In order: at a step that all agree on; else at once, out of any collective."""

    attempt: int
    in_order: bool


@dataclass(frozen=True)
class Dump:
    """Launcher to rank: write torch's flight recorder, where there is one, to this file."""

    path: str


@dataclass(frozen=True)
class Measure:
    """Launcher to rank: write what it has of its GPU's memory to this file, as this rank."""

    path: str
    rank: int


Message = Joined | Broke | Closed | Lost | Slow | Resumed | World | Close | Leave | Dump | Measure
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


class LauncherLink(Protocol):
    """A rank's end of a line to a launcher that can give it another world: ours, or an engine's."""

    replaces: bool  # whether a rank that cannot regroup is restarted, to resume from the checkpoint
    closes_gates: bool  # whether it has all ranks close their step gates before it has one abort

    @property
    def regroups(self) -> bool:
        """Whether this rank can continue in another world, as it last said in `Joined`."""

    def tell(self, message: Message) -> None: ...

    def on_cut_off(self, end: Callable[[], None]) -> None:
        """From now on `end` ends the collective that this rank is in; any thread may call it."""

    def cut_off(self) -> None:
        """End the collective that this rank is in."""

    def on_close(self, attempt: int, close: Callable[[], None]) -> None:
        """`close` lets no further step of this attempt count; any thread may call it, also at once."""

    def asked_to_leave(self, attempt: int) -> bool:
        """Whether this attempt shall end at the next step that all agree on."""

    def is_cut_off(self, attempt: int) -> bool:
        """Whether this attempt is over, wherever this rank stands in it."""

    def next_world(self, after_attempt: int) -> WorkerEnv | None:
        """Wait for the world after this attempt; None when there will be none."""


def encode(message: Message) -> bytes:
    """
    >>> decode(encode(Lost(attempt=0)))
    Lost(attempt=0, message='', holds=False)
    """
    return json.dumps({"kind": type(message).__name__} | asdict(message)).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """None for a kind that this version does not know."""
    raw = json.loads(line)
    kind = _KINDS.get(raw.pop("kind", ""))
    if kind is None:
        return None
    known = {f.name for f in fields(kind)}
    message: Message = kind(**{name: value for name, value in raw.items() if name in known})
    return message
