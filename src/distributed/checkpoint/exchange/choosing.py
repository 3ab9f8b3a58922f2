"""Choosing one checkpoint of a run: the last one, the best one, or that of a step."""

from __future__ import annotations

from distributed.checkpoint.exchange.catalog import Opened, find_root, list_checkpoints, open_one
from distributed.checkpoint.format.manifest import step_of
from distributed.checkpoint.storage.lineage import newest_first
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.core.errors import CheckpointError

WORDS = ("last", "best")


def open_chosen(place: str, which: str | int = "last") -> Opened:
    """One of the checkpoints of a folder or run directory: "last", "best" by the run's `keep_best`, or a step."""
    if which == "last":
        return open_one(place)
    if which == "best":
        return open_one(_best_of(place))
    storage = find_root(place)
    found = [name for name in newest_first(storage) if step_of(name) == int(which)]
    if not found:
        steps = sorted({step_of(name) or 0 for name in newest_first(storage)})
        raise CheckpointError(
            f"{storage.root} has no checkpoint of step {which}",
            why=f"it has those of steps {', '.join(map(str, steps[-8:]))}" if steps else "it has none that is whole",
            do=f"distributed checkpoint ls {storage.root}",
        )
    return Opened(storage.locate(found[0]), storage, read_manifest(storage, found[0]))  # of the run that saved last


def _best_of(place: str) -> str:
    listing = list_checkpoints(place)
    best = next((row.path for row in listing.rows if row.is_best and row.is_sound), None)
    if best is None:
        raise CheckpointError(
            f"no checkpoint in {listing.root} is known to be the best",
            why="the run kept none by a metric: keep_best was not set, or no checkpoint was saved where it is measured",
            do="train with keep_best='val_loss', or name a step: distributed checkpoint ls shows them",
        )
    return best
