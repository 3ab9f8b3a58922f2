"""Lineage: whose checkpoints a folder holds, and under which names a run adds its own.

A run owns what it wrote, over all its launches: one that resumes from a run's newest checkpoint continues that run.
One that starts at step 0 or goes back to an earlier step is another run, with names of its own: nothing is replaced.

    step-000005  step-000010  step-000015           the first run of a folder
         └────── step-000010-1f2e3d4c  …            a run that went back to step 5 of it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distributed.checkpoint.format.manifest import Manifest, line_of, manifest_file, step_of
from distributed.checkpoint.format.parsing import Damaged
from distributed.checkpoint.storage.files import Storage
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.errors import CheckpointError, Problem

RUN, SEQUENCE = "owner", "sequence"  # in the meta of a manifest: whose it is, and the how-manieth of its folder
_LINE_DIGITS = 8


@dataclass(frozen=True)
class Lineage:
    """Which run saves, and what its names end with; the first run of a folder has plain names."""

    run: str = ""
    line: str = ""


NOBODY = Lineage()  # of a saver that is no run's


def run_of(meta: Mapping[str, Any]) -> str | None:
    """The run that wrote a checkpoint; None where no run did."""
    return None if "imported" in meta else str(meta.get(RUN) or meta.get("launch") or "")


def sequence_of(meta: Mapping[str, Any]) -> int:
    """Counts the saves of a folder; 0 where that was not written down."""
    number = meta.get(SEQUENCE, 0)
    return number if isinstance(number, int) else 0


def whole_names(storage: Storage) -> list[str]:
    """The checkpoints of a folder that have a manifest, of earlier steps first."""
    names = [name for name in storage.children() if step_of(name) is not None]
    return sorted((name for name in names if storage.size(manifest_file(name)) is not None), key=_by_step)


def newest_first(storage: Storage) -> list[str]:
    """All checkpoints of a folder: those of the run that saved last first, each run's later steps first."""
    lines: dict[str, list[str]] = {}
    for name in reversed(whole_names(storage)):
        lines.setdefault(line_of(name), []).append(name)
    if len(lines) == 1:  # then no manifest need be read
        return next(iter(lines.values()))
    return [name for names in sorted(lines.values(), key=lambda names: _saved_last(storage, names)) for name in names]


def choose_lineage(storage: Storage, launch: str, found: tuple[str, Manifest] | None, passed: Iterable[str]) -> Lineage:
    """Of a launch that resumes from the checkpoint `found`, or from none; damaged ones that it `passed` over do not
    count."""
    names = whole_names(storage)
    own = launch[:_LINE_DIGITS]
    if found is None:
        return Lineage(launch, own if names else "")
    path, manifest = found
    root, _, name = path.rpartition("/")
    if open_storage(root).root != storage.root:
        return Lineage(launch, own if names else "")
    left_out = {path.rpartition("/")[2] for path in passed}
    later = [other for other in names if line_of(other) == line_of(name) and other not in left_out]
    if any((step_of(other) or 0) > manifest.step for other in later):
        return Lineage(launch, own)
    return Lineage(run_of(manifest.meta) or launch, line_of(name))


def check_unused(storage: Storage) -> list[Problem]:
    """A run that does not resume must not write among the checkpoints of another."""
    names = whole_names(storage)
    if not names:
        return []
    some = f"{len(names)} checkpoints, {names[0]} to {names[-1]}" if len(names) > 1 else f"the checkpoint {names[0]}"
    return [
        Problem(
            f"checkpoint_dir {storage.root} holds another run: {some}",
            why="the new run does not resume, and its checkpoints would be mixed with those",
            do="resume that run: resume_from_checkpoint=true; or set another checkpoint_dir",
        )
    ]


def _by_step(name: str) -> tuple[int, str]:
    return step_of(name) or 0, name


def _saved_last(storage: Storage, names: list[str]) -> tuple[float, str]:
    """To sort by: the later its newest sound checkpoint was saved, the less."""
    for name in names:
        try:
            manifest = read_manifest(storage, name)
        except Damaged:
            continue
        except CheckpointError:  # of a newer format, for example: a resume must report it
            return -math.inf, name
        return -float(sequence_of(manifest.meta)), line_of(name)
    return math.inf, names[0]
