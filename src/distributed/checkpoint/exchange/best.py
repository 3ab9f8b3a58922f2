"""The best checkpoint of a run, by what was measured after its steps, all of which its last checkpoint remembers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distributed.checkpoint.exchange.catalog import Opened, open_one
from distributed.checkpoint.format.manifest import Manifest, step_of
from distributed.checkpoint.format.parsing import Damaged
from distributed.checkpoint.storage.lineage import run_of, whole_names
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.core.errors import CheckpointError
from distributed.core.values import parse_best


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint and what it is the best by."""

    path: str
    step: int
    epoch: int
    metric: str
    value: float


def find_best(newest: str, wanted: str = "") -> tuple[BestCheckpoint, Opened]:
    """Of the run that has saved `newest`. `wanted`: 'val_loss', 'max:val_f1' …; "": what the run keeps its best by."""
    last = open_one(newest)
    plan = last.manifest.meta.get("plan", {})
    direction, metric = _parse(wanted or plan.get("checkpoint", {}).get("best", ""))
    measured = _measured(last.manifest)
    saved = {step_of(name) for name in whole_names(last.storage)} | _due(last.manifest)
    rated = {step: one for step, one in measured.items() if step in saved and math.isfinite(one.get(metric, math.nan))}
    if not rated:
        names = sorted({name for one in measured.values() for name in one})
        raise CheckpointError(
            f"no checkpoint of the run has a finite {metric}",
            why=f"after its steps were measured {', '.join(names) or 'no metrics'}",
            do="fit(train_loader, val_loader) measures val_loss and val_accuracy",
        )
    sign = 1 if direction == "min" else -1
    step = min(rated, key=lambda at: (sign * rated[at][metric], at))
    value, epoch = rated[step][metric], _epoch_of(last.manifest, step)
    for found in _at(last, step):
        if run_of(found.manifest.meta) == run_of(last.manifest.meta) and metric in _measured(found.manifest)[step]:
            return BestCheckpoint(found.path, step, epoch, metric, value), found
    raise CheckpointError(
        f"the checkpoint with the best {metric}, {value:g} after step {step}, is not there",
        why=f"no checkpoint of this run in {last.storage.root} was saved after step {step}, or it was removed",
        do=f"keep_best={metric!r}, keep_last=1 keeps it",
    )


def _parse(text: str) -> tuple[str, str]:
    if not text:
        raise CheckpointError(
            "by which metric a checkpoint is the best is not said",
            why="the run was trained without keep_best, so no metric says which is best",
            do="load_best('val_loss'), or train with keep_best='val_loss', keep_last=1",
        )
    try:
        return parse_best(text)
    except ValueError as wrong:
        raise CheckpointError(f"whether the least or the most {text} is best is not known", do=str(wrong)) from None


def _ends(manifest: Manifest) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The step after which each epoch, or part of one, ended, and its record."""
    step = 0
    for record in manifest.shared.skeleton.get("epochs", []):
        step += record["steps"]
        yield step, record


def _measured(manifest: Manifest) -> defaultdict[int, dict[str, float]]:
    """By steps, the metrics of the state after each: an epoch's validation may be that of an earlier step."""
    evaluations = manifest.shared.skeleton.get("evaluations", [])
    evaluated = {name for record in evaluations for name in record["metrics"]}
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for step, record in _ends(manifest):
        found[step] = {name: value for name, value in record["metrics"].items() if name not in evaluated}
    for record in evaluations:
        found[record["step"]] |= record["metrics"]
    return found


def _due(manifest: Manifest) -> set[int]:
    """The steps after which the run has saved for the sake of what was measured there."""
    how = manifest.meta.get("plan", {}).get("checkpoint", {})
    if how.get("unit") != "validations":
        return {step for step, _ in _ends(manifest)}
    evaluations = manifest.shared.skeleton.get("evaluations", [])
    return {record["step"] for number, record in enumerate(evaluations, 1) if number % how["every"] == 0}


def _epoch_of(manifest: Manifest, step: int) -> int:
    """In which it is the last step, or a step within."""
    return int(next((record["epoch"] for end, record in _ends(manifest) if end >= step), 0))


def _at(last: Opened, step: int) -> Iterator[Opened]:
    """The sound checkpoints of this step in the same folder, of any run."""
    storage = last.storage
    for name in (name for name in whole_names(storage) if step_of(name) == step):
        with suppress(Damaged):
            yield Opened(storage.locate(name), storage, read_manifest(storage, name))
