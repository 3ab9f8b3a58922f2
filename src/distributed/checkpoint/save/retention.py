"""Retention: which checkpoints stay, and the safe removal of what the others held.

Manifests go first, then the chunks that no manifest names: a process killed in between leaves garbage, never a
checkpoint with holes. Chunks that no manifest has ever named may belong to a save of another process and wait.

Only what this run wrote is ever removed, the oldest first by time, not by step: a folder may hold other runs,
and a run may go back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distributed.checkpoint.format.manifest import manifest_file, step_name, step_of
from distributed.checkpoint.format.parsing import MAX_TEXT_BYTES, Damaged, NewerFormat, parse_manifest
from distributed.checkpoint.storage.chunks import FOLDER
from distributed.checkpoint.storage.files import FileEntry, NotThere, Storage
from distributed.checkpoint.storage.lineage import run_of, sequence_of
from distributed.core.errors import ConfigError

PARTS = "parts"  # what ranks have stored of a checkpoint that is not published yet


@dataclass(frozen=True)
class Retention:
    """Of a run's own stay the `keep_last` that it wrote last, those at multiples of `keep_every` steps, the best by
    their metric, and the pinned."""

    keep_last: int | None = None  # None: all
    keep_every: int | None = None
    best: str | None = None  # "min" or "max": which metric is the best
    best_count: int = 1  # how many of the best
    pinned: frozenset[str] = frozenset()  # names such as step-000500

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError(
                f"keep_last={self.keep_last}",
                why="the newest checkpoint must stay, so that keep_last is at least 1",
                do="keep_last=1",
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(
                f"keep_every={self.keep_every}", why="keep_every is a number of steps, at least 1", do="keep_every=1000"
            )
        if self.best not in (None, "min", "max"):
            raise ConfigError(
                f"best={self.best!r}",
                why="the best value is the smallest or the largest",
                do="best='min' or best='max'",
            )
        if self.keep_last is None and self.keep_every:
            raise ConfigError(
                "keep_every has no effect alone",
                why="without keep_last every checkpoint is kept",
                do="set keep_last too",
            )


@dataclass(frozen=True)
class Known:
    """What retention needs to know of one checkpoint."""

    step: int
    metric: float | None = None
    chunks: frozenset[str] = frozenset()
    name: str = ""  # empty: that of its step
    run: str | None = ""  # that wrote it; None: no run did
    sequence: int = 0  # the later it was written, the greater

    @property
    def at(self) -> str:
        return self.name or step_name(self.step)


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


def choose(saved: Sequence[Known], retention: Retention, run: str = "") -> list[str]:
    """The names of what a run may remove of its own, the longest written first.

    >>> choose([Known(10), Known(20), Known(30), Known(40)], Retention(keep_last=1, keep_every=20))
    ['step-000010', 'step-000030']
    >>> choose([Known(1, 0.1), Known(2, 0.5), Known(3, 0.4)], Retention(keep_last=1, best="min"))
    ['step-000002']
    >>> choose([Known(1, 0.1), Known(2, 0.5), Known(3, 0.4)], Retention(keep_last=1, best="max", best_count=2))
    ['step-000001']
    >>> choose([Known(30, run="a"), Known(5, run="b", sequence=1), Known(10, run="b", sequence=2)], Retention(1), "b")
    ['step-000005']
    >>> choose([Known(1, 0.5), Known(2, 0.5), Known(3, 0.4)], Retention(keep_last=1, best="max"))  # the first of equals
    ['step-000002']
    """
    if retention.keep_last is None:
        return []
    own = sorted((known for known in saved if known.run == run), key=lambda known: (known.sequence, known.step))
    kept = {known.at for known in own[-retention.keep_last :]}
    if retention.keep_every:
        kept |= {known.at for known in own if known.step % retention.keep_every == 0}
    sign = -1.0 if retention.best == "max" else 1.0
    rated = [
        (sign * known.metric, known.step, known.at)
        for known in own
        if known.metric is not None and math.isfinite(known.metric)
    ]
    if retention.best:
        kept |= {name for *_, name in sorted(rated)[: retention.best_count]}
    return [known.at for known in own if known.at not in kept | retention.pinned]


@dataclass
class Collector:
    """Removes what is not kept. Only while no rank of its own run is saving."""

    storage: Storage
    retention: Retention
    guard_s: float = 3600.0  # how long a chunk without a manifest may belong to a save of another process
    at: Callable[[str], None] = lambda point: None
    run: str = ""  # whose checkpoints may be removed
    _read: dict[str, tuple[FileEntry, Known]] = field(default_factory=dict)

    def collect(self, newest: str = "") -> Collected:
        """`newest` is what was written just now, and stays."""
        known, written, unreadable = self._manifests()
        gone = [name for name in choose(list(known.values()), self.retention, self.run) if name != newest]
        for name in gone:
            self.storage.delete(manifest_file(name))
            self._read.pop(name, None)
            self.at("garbage: manifest removed")
        removed, freed = (0, 0) if unreadable else self._remove_chunks(gone, known, written)
        return Collected(tuple(gone), removed, freed, tuple(unreadable))

    def last_sequence(self) -> int:
        """Of all checkpoints here that can be read, of any run."""
        return max((known.sequence for known in self._manifests()[0].values()), default=0)

    def _remove_chunks(
        self, gone: list[str], known: dict[str, Known], written: dict[str, FileEntry]
    ) -> tuple[int, int]:
        now = max((entry.modified for entry in written.values()), default=0.0)  # by the storage's clock
        living = {chunk for name, item in known.items() if name not in gone for chunk in item.chunks}
        # A chunk that was written or used again after its last checkpoint was published belongs to a save in flight.
        dead = {chunk: written[name].modified for name in gone for chunk in known[name].chunks if chunk not in living}
        doomed: dict[str, FileEntry] = {}
        for name, entry in self.storage.entries(FOLDER).items():
            digest = name.rsplit("/", 1)[-1]
            orphan = digest not in living and now - entry.modified >= self.guard_s
            if orphan or entry.modified <= dead.get(digest, -math.inf):
                doomed[name] = entry
        if doomed:  # another process may have published since
            again, _, unreadable = self._manifests()
            living = {chunk for item in again.values() for chunk in item.chunks}
            names = [] if unreadable else [name for name in doomed if name.rsplit("/", 1)[-1] not in living]
            doomed = {name: doomed[name] for name in names}
        for name in doomed:
            self.storage.delete(name)
            self.at("garbage: chunk removed")
        for name, entry in self.storage.entries(PARTS).items():
            if now - entry.modified >= self.guard_s:
                self.storage.delete(name)
        self.storage.sweep(self.guard_s)
        return len(doomed), sum(entry.size for entry in doomed.values())

    def _manifests(self) -> tuple[dict[str, Known], dict[str, FileEntry], list[str]]:
        """By name: what is known, when it was written; and the names of those that cannot be read."""
        known: dict[str, Known] = {}
        written: dict[str, FileEntry] = {}
        unreadable: list[str] = []
        for name in self.storage.children():
            step = step_of(name)
            if step is None:
                continue
            entry = self.storage.entries(name).get(manifest_file(name))
            if entry is None:
                continue
            if name not in self._read or self._read[name][0] != entry:
                try:
                    text = self.storage.read(manifest_file(name), 0, MAX_TEXT_BYTES + 1)
                    manifest = parse_manifest(text, self.storage.locate(name))
                except (Damaged, NewerFormat, NotThere):
                    unreadable.append(name)
                    continue
                self._read[name] = (
                    entry,
                    Known(
                        step,
                        manifest.metric,
                        frozenset(manifest.chunks),
                        name,
                        run_of(manifest.meta),
                        sequence_of(manifest.meta),
                    ),
                )
            known[name], written[name] = self._read[name][1], entry
        return known, written, unreadable
