"""A checkpoint of a run, whole in a folder of its own: what `save_state` leaves and `load_state` takes."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed.checkpoint.format.manifest import manifest_file, step_of
from distributed.checkpoint.storage.chunks import FOLDER, chunk_name
from distributed.checkpoint.storage.local import LocalStorage
from distributed.checkpoint.storage.manifests import open_checkpoint, read_manifest
from distributed.core.errors import ConfigError
from distributed.core.run_dir import CHECKPOINTS  # Accelerate has the same name for its folder

_NUMBER = re.compile(r"\d+")


def copy_checkpoint(path: str, folder: str) -> None:
    """In place of what the folder had before. On one disk, chunks are linked, and take no room."""
    storage, name = open_checkpoint(path)
    manifest, target = read_manifest(storage, name), LocalStorage(folder)
    for digest in manifest.chunks:
        chunk = chunk_name(digest)
        if target.size(chunk) == manifest.chunks[digest]:
            continue
        if not _is_linked(storage, target, chunk):
            target.write(chunk, storage.read(chunk))
    before = [child for child in target.children() if step_of(child) is not None and child != name]
    target.write(manifest_file(name), storage.read(manifest_file(name)))
    for other in before:
        shutil.rmtree(target.locate(other))
    kept = {chunk_name(digest) for digest in manifest.chunks}
    for chunk in target.list(FOLDER):
        if chunk not in kept:
            target.delete(chunk)


def _is_linked(storage: Any, target: LocalStorage, chunk: str) -> bool:
    if not isinstance(storage, LocalStorage):
        return False
    place = Path(target.locate(chunk))
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # another disk, or a file system without links
        os.link(storage.locate(chunk), place)
        return True
    return False


def next_folder(project: Any, output_dir: str | None, *, removes: bool) -> str:
    """Where `save_state` saves. `project`: a ProjectConfiguration; `removes`: states beyond its total_limit."""
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ConfigError(
                "save_state() without a folder", do="save_state('folder'), or automatic_checkpoint_naming"
            )
        return os.fspath(output_dir)
    states = Path(project.project_dir or ".", CHECKPOINTS)
    states.mkdir(parents=True, exist_ok=True)
    folder = states / f"checkpoint_{project.iteration}"
    if folder.exists() and removes:
        raise ConfigError(f"{folder} exists", do="set ProjectConfiguration(iteration=…) to the next number")
    limit = project.total_limit
    if removes and limit is not None:
        before = sorted(states.iterdir(), key=_number)
        for old in before[: max(0, len(before) + 1 - limit)]:
            shutil.rmtree(old)
    return str(folder)


def newest_folder(project: Any, input_dir: str | None) -> str:
    """What `load_state` loads."""
    if input_dir is not None:
        return os.fspath(input_dir)
    states = Path(project.project_dir or ".", CHECKPOINTS)
    found = sorted(states.iterdir(), key=_number) if states.is_dir() else []
    if not project.automatic_checkpoint_naming or not found:
        raise ConfigError("load_state() without a folder", do="load_state('folder')")
    return str(found[-1])


def _number(folder: Path) -> int:
    """
    >>> _number(Path("checkpoints/checkpoint_12"))
    12
    """
    return int((_NUMBER.findall(folder.name) or ["-1"])[-1])
