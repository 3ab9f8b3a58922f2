"""Where a checkpoint lies, and its manifest, read from there and checked."""

from __future__ import annotations

from distributed.checkpoint.format.manifest import FILE, Manifest, manifest_file, step_of
from distributed.checkpoint.format.parsing import MAX_TEXT_BYTES, Damaged, parse_manifest
from distributed.checkpoint.storage.files import NotThere, Storage
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.errors import CheckpointError


def open_checkpoint(path: str) -> tuple[Storage, str]:
    """The storage that a checkpoint's folder lies in, and its name there."""
    trimmed = path.rstrip("/").removesuffix(f"/{FILE}")
    root, _, name = trimmed.rpartition("/")
    if step_of(name) is None:
        raise CheckpointError(
            f"{path} is not a checkpoint",
            why="a checkpoint is a folder with the name step-… and a number",
            do="pass …/step-000500",
        )
    return open_storage(root or ("/" if trimmed.startswith("/") else ".")), name


def read_manifest(storage: Storage, name: str) -> Manifest:
    """The manifest of one checkpoint; Damaged when it is missing, of another step, or unsound."""
    file = manifest_file(name)
    where = storage.locate(file)
    try:
        text = storage.read(file, 0, MAX_TEXT_BYTES + 1)
    except NotThere as missing:
        raise Damaged(f"{where} is missing", why="the checkpoint is not complete", do=_others(storage)) from missing
    manifest = parse_manifest(text, where)
    if manifest.step != step_of(name):
        raise Damaged(
            f"{where} is of step {manifest.step}",
            why=f"the manifest lies in the folder of another step, {name}",
            do=_others(storage),
        )
    return manifest


def _others(storage: Storage) -> str:
    return f"use another one: distributed checkpoint ls {storage.root}"
