"""Checkpoints on disk: `step-000500/` with safetensors files and a manifest.

A checkpoint exists only once its folder has its final name: it is written beside it under another one and renamed last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from distributed.checkpoint.tree import flatten, unflatten
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session

FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


def checkpoint_path(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"step-{step:06d}"


def save_checkpoint(
    directory: str | Path, step: int, shared: dict[str, Any], own: dict[str, Any], session: Session
) -> Path:
    """Every rank calls it: rank 0 writes what all share, each rank writes what is its own."""
    final = checkpoint_path(directory, step)
    staging = final.with_name(f".{final.name}.partial")
    if session.is_main:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    session.barrier("checkpoint begins")
    staging.mkdir(parents=True, exist_ok=True)  # a node that does not share this disk
    _write(staging / f"rank-{session.rank}", own)
    if session.is_main:
        _write(staging / "shared", shared)
    session.barrier("checkpoint written")
    if session.is_main:
        manifest = {"format": FORMAT, "step": step, "world_size": session.world_size, "torch": torch.__version__}
        _write_text(staging / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        if final.exists():
            shutil.rmtree(final)
        staging.rename(final)
        _sync_dir(final.parent)
    session.barrier("checkpoint published")
    return final


def list_checkpoints(directory: str | Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in Path(directory).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if (path / "manifest.json").is_file()), key=lambda path: int(path.name[5:]))


def find_checkpoint(directory: str | Path, resume: bool | str) -> Path | None:
    """The checkpoint to resume from: the newest one when `resume` is True, or the one at that path."""
    if resume is False:
        return None
    if resume is True:
        found = list_checkpoints(directory)
        return found[-1] if found else None
    path = Path(resume)
    if (path / "manifest.json").is_file():
        return path
    inside = list_checkpoints(path)
    if not inside:
        raise CheckpointError(
            f"there is no checkpoint at {path}", do="pass a checkpoint folder, or one that holds some"
        )
    return inside[-1]


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as damaged:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read", why=str(damaged), do="use an older one"
        ) from damaged
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has format {manifest.get('format')!r}, this version reads {FORMAT}",
            do="use the version that wrote it",
        )
    return manifest


def load_part(path: Path, part: str) -> dict[str, Any] | None:
    """`shared`, or `rank-3`; None when the checkpoint has no such part."""
    if not (path / f"{part}.json").exists():
        return None
    try:
        skeleton = json.loads((path / f"{part}.json").read_text())
        return dict(unflatten(skeleton, load_file(path / f"{part}.safetensors")))
    except (OSError, ValueError, KeyError, SafetensorError) as damaged:
        raise CheckpointError(
            f"{part!r} of the checkpoint {path} is damaged", why=str(damaged), do="use an older one"
        ) from damaged


def _write(stem: Path, tree: dict[str, Any]) -> None:
    tensors, skeleton = flatten(tree)
    rows = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    target = stem.with_suffix(".safetensors")
    save_file(rows, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    _write_text(stem.with_suffix(".json"), json.dumps(skeleton))


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
