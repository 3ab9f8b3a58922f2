"""Retention: which checkpoints stay, and the safe removal of what the others held.

Manifests go first, then the chunks that no manifest names: a process killed in between leaves garbage, never a
checkpoint with holes. Chunks that no manifest has ever named may belong to a save of another process and wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distributed.checkpoint.chunks import FOLDER, Damaged
from distributed.checkpoint.files import Entry, NotThere, Storage
from distributed.checkpoint.manifest import FILE, step_name, step_of
from distributed.checkpoint.parsing import MAX_TEXT_BYTES, NewerFormat, parse_manifest
from distributed.core.errors import ConfigError

PARTS = "parts"  # what ranks have stored of a checkpoint that is not published yet


@dataclass(frozen=True)
class Retention:
    """The newest `keep_last` stay, those at multiples of `keep_every` steps, the best by its metric, and the pinned."""

    keep_last: int | None = None  # None: all
    keep_every: int | None = None
    best: str | None = None  # "min" or "max": which metric is the best
    pinned: frozenset[str] = frozenset()  # names such as step-000500

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError(f"keep_last={self.keep_last}", why="the newest checkpoint must stay", do="set 1 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every={self.keep_every}", why="it is a number of steps", do="set 1 or more")
        if self.best not in (None, "min", "max"):
            raise ConfigError(
                f"best={self.best!r}", why="the best metric is the least or the greatest", do="min or max"
            )
        if self.keep_last is None and (self.keep_every or self.best):
            raise ConfigError("keep_every and best have no effect alone", why="all are kept", do="set keep_last too")


@dataclass(frozen=True)
class Known:
    """What retention needs to know of one checkpoint."""

    step: int
    metric: float | None = None
    chunks: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Collected:
    """What a collection removed."""

    checkpoints: tuple[str, ...] = ()
    chunks: int = 0
    freed_bytes: int = 0
    blocked_by: tuple[str, ...] = ()  # checkpoints that cannot be read: while they are there no chunk is removed

    def __str__(self) -> str:
        text = (
            f"removed {len(self.checkpoints)} checkpoints and {self.chunks} chunks ({self.freed_bytes / 2**20:.1f} MiB)"
        )
        if self.blocked_by:
            text += f"; no chunks while these cannot be read: {', '.join(self.blocked_by)}"
        return text


def choose(saved: Sequence[Known], retention: Retention) -> list[int]:
    """The steps to remove, oldest first.

    >>> choose([Known(10), Known(20), Known(30), Known(40)], Retention(keep_last=1, keep_every=20))
    [10, 30]
    >>> choose([Known(1, 0.1), Known(2, 0.5), Known(3, 0.4)], Retention(keep_last=1, best="min"))
    [2]
    """
    if retention.keep_last is None:
        return []
    steps = sorted(known.step for known in saved)
    kept = set(steps[-retention.keep_last :])
    if retention.keep_every:
        kept |= {step for step in steps if step % retention.keep_every == 0}
    rated = [(known.metric, known.step) for known in saved if known.metric is not None and math.isfinite(known.metric)]
    if retention.best and rated:
        kept.add(min(rated)[1] if retention.best == "min" else max(rated)[1])
    kept |= {step for step in steps if step_name(step) in retention.pinned}
    return [step for step in steps if step not in kept]


@dataclass
class Collector:
    """Removes what is not kept. Only while no rank of its own run is saving."""

    storage: Storage
    retention: Retention
    guard_s: float = 3600.0  # how long a chunk without a manifest may belong to a save of another process
    at: Callable[[str], None] = lambda point: None
    _read: dict[str, tuple[Entry, Known]] = field(default_factory=dict)

    def collect(self) -> Collected:
        known, written, unreadable = self._manifests()
        gone = choose(list(known.values()), self.retention)
        for step in gone:
            self.storage.delete(f"{step_name(step)}/{FILE}")
            self._read.pop(step_name(step), None)
            self.at("garbage: manifest removed")
        removed, freed = (0, 0) if unreadable else self._remove_chunks(known, written, gone)
        return Collected(tuple(step_name(step) for step in gone), removed, freed, tuple(unreadable))

    def _remove_chunks(self, known: dict[int, Known], written: dict[int, Entry], gone: list[int]) -> tuple[int, int]:
        living = {chunk for step, item in known.items() if step not in gone for chunk in item.chunks}
        # A chunk that was written or used again after its last checkpoint was published belongs to a save in flight.
        dead = {chunk: written[step].modified for step in gone for chunk in known[step].chunks if chunk not in living}
        now = max((entry.modified for entry in written.values()), default=0.0)  # by the storage's clock
        removed = freed = 0
        for name, entry in self.storage.entries(FOLDER).items():
            digest = name.rsplit("/", 1)[-1]
            orphan = digest not in living and now - entry.modified >= self.guard_s
            if orphan or entry.modified <= dead.get(digest, -math.inf):
                self.storage.delete(name)
                removed, freed = removed + 1, freed + entry.size
                self.at("garbage: chunk removed")
        for name, entry in self.storage.entries(PARTS).items():
            if now - entry.modified >= self.guard_s:
                self.storage.delete(name)
        self.storage.sweep(self.guard_s)
        return removed, freed

    def _manifests(self) -> tuple[dict[int, Known], dict[int, Entry], list[str]]:
        """By step: what is known, when it was written; and the names of those that cannot be read."""
        known: dict[int, Known] = {}
        written: dict[int, Entry] = {}
        unreadable: list[str] = []
        for name in self.storage.children():
            step = step_of(name)
            if step is None:
                continue
            entry = self.storage.entries(name).get(f"{name}/{FILE}")
            if entry is None:
                continue
            if name not in self._read or self._read[name][0] != entry:
                try:
                    text = self.storage.read(f"{name}/{FILE}", 0, MAX_TEXT_BYTES + 1)
                    manifest = parse_manifest(text, self.storage.locate(name))
                except (Damaged, NewerFormat, NotThere):
                    unreadable.append(name)
                    continue
                self._read[name] = (entry, Known(step, manifest.metric, frozenset(manifest.chunks)))
            known[step], written[step] = self._read[name][1], entry
        return known, written, unreadable
