"""Catalog: which checkpoints a place holds, what each added, and the one that a path means."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from distributed.checkpoint.format.manifest import FILE, Manifest, manifest_file, step_of
from distributed.checkpoint.format.parsing import Damaged, NewerFormat
from distributed.checkpoint.storage.chunks import FOLDER
from distributed.checkpoint.storage.files import Storage
from distributed.checkpoint.storage.lineage import newest_first, run_of, whole_names
from distributed.checkpoint.storage.manifests import open_checkpoint, read_manifest
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.errors import CheckpointError
from distributed.core.registry import nearest
from distributed.core.run_dir import CHECKPOINTS
from distributed.core.values import parse_best

_MOST_BESIDE = 64  # folders that are looked into for a hint


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a listing; numbers are None where its manifest cannot be read."""

    step: int
    path: str
    status: str  # ok, or what is wrong
    created: str = ""
    total_bytes: int | None = None
    new_bytes: int | None = None  # of chunks that no checkpoint of an earlier step has
    world_size: int | None = None
    metric: float | None = None
    is_best: bool = False
    run: str = ""  # which wrote it; a folder may hold several

    @property
    def is_sound(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Listing:
    root: str
    rows: tuple[CheckpointRow, ...]  # by step
    stored_bytes: int
    unused_bytes: int | None  # of chunks that no manifest names; None where one cannot be read


@dataclass(frozen=True)
class Opened:
    """One checkpoint, its manifest read and checked."""

    path: str
    storage: Storage
    manifest: Manifest


def list_checkpoints(url: str) -> Listing:
    """What a checkpoint_dir or run directory holds. Manifests are checked and chunks counted; no chunk is read."""
    storage = find_root(url)
    chunks = {name.rsplit("/", 1)[-1]: entry.size for name, entry in storage.entries(FOLDER).items()}
    rows: list[CheckpointRow] = []
    manifests: dict[str, Manifest] = {}
    seen: set[str] = set()
    names = [name for name in storage.children() if step_of(name) is not None]
    for step, name in sorted((step_of(name) or 0, name) for name in names):
        path = storage.locate(name)
        try:
            manifest = read_manifest(storage, name)
        except NewerFormat as newer:
            rows.append(CheckpointRow(step, path, newer.problems[0].what))
            continue
        except Damaged as bad:
            incomplete = storage.size(manifest_file(name)) is None
            rows.append(CheckpointRow(step, path, "incomplete: it has no manifest" if incomplete else _say(bad)))
            continue
        manifests[path] = manifest
        wrong = sum(chunks.get(digest) != length for digest, length in manifest.chunks.items())
        rows.append(
            CheckpointRow(
                step,
                path=path,
                status=f"damaged: {wrong} of {len(manifest.chunks)} chunks are missing or cut short" if wrong else "ok",
                created=manifest.created,
                total_bytes=manifest.nbytes,
                new_bytes=sum(length for digest, length in manifest.chunks.items() if digest not in seen),
                world_size=manifest.world_size,
                metric=manifest.metric,
                run=run_of(manifest.meta) or "",
            )
        )
        seen |= manifest.chunks.keys()
    readable = len(manifests) == sum(not row.status.startswith("incomplete") for row in rows)
    unused = sum(size for digest, size in chunks.items() if digest not in seen) if readable else None
    newest = next((path for path in map(storage.locate, newest_first(storage)) if path in manifests), None)
    return Listing(storage.root, _mark(rows, manifests.get(newest or "")), sum(chunks.values()), unused)


def open_one(path: str) -> Opened:
    """The checkpoint at a path, or the newest of a checkpoint_dir or run directory; its manifest is sound."""
    trimmed = path.rstrip("/").removesuffix(f"/{FILE}")
    name = trimmed.rpartition("/")[2]
    if step_of(name) is not None:
        storage, name = open_checkpoint(path)
        if storage.size(manifest_file(name)) is None:
            raise _no_such_step(storage, name, path)
    else:
        storage = find_root(path)
        whole = newest_first(storage)
        if not whole:
            raise CheckpointError(
                f"no checkpoint in {storage.root} is complete",
                why="no save in it has ended: none has a manifest",
                do="name another folder",
            )
        name = whole[0]
    return Opened(storage.locate(name), storage, read_manifest(storage, name))


def open_all(path: str) -> list[tuple[str, Storage, str]]:
    """The checkpoint at a path, or all of a folder by their steps, as path, storage and name; none is read."""
    trimmed = path.rstrip("/").removesuffix(f"/{FILE}")
    if step_of(trimmed.rpartition("/")[2]) is None:
        storage = find_root(path)
        return [(storage.locate(name), storage, name) for name in whole_names(storage)]
    storage, name = open_checkpoint(path)
    if storage.size(manifest_file(name)) is None:
        raise _no_such_step(storage, name, path)
    return [(storage.locate(name), storage, name)]


def find_root(url: str) -> Storage:
    """The storage of a checkpoint_dir, or of the checkpoints of a run directory."""
    storage = open_storage(url)
    children = storage.children()
    if any(step_of(child) is not None for child in children):
        return storage
    if CHECKPOINTS in children:
        inner = open_storage(f"{url.rstrip('/')}/{CHECKPOINTS}")
        if any(step_of(child) is not None for child in inner.children()):
            return inner
    if os.path.isfile(url):
        raise CheckpointError(
            f"{url} is a file, not a checkpoint",
            why="a checkpoint is a folder such as step-000500",
            do=f"distributed checkpoint import {url} --to DIR makes one of a .pt or .safetensors file",
        )
    if "latest" in children:
        raise CheckpointError(
            f"there is no checkpoint of ours in {url}",
            why="the folder has a file `latest`, as one of DeepSpeed has",
            do=f"distributed checkpoint import {url} --to DIR",
        )
    if children:
        names = ", ".join(children[:5]) + (" …" if len(children) > 5 else "")
        raise CheckpointError(
            f"there is no checkpoint in {url}", why=f"the folder holds {names}", do="pass a folder with step-… in it"
        )
    raise CheckpointError(f"there is no checkpoint at {url}", why=_why_missing(url), do=_hint(url))


def _mark(rows: list[CheckpointRow], newest: Manifest | None) -> tuple[CheckpointRow, ...]:
    """The best one of the run that saved last, by the metric that it keeps it for."""
    settings = newest.meta.get("settings") if newest is not None else None
    run = run_of(newest.meta) if newest is not None else None
    keep_best = settings.get("keep_best") if isinstance(settings, dict) else None
    sign = -1.0 if isinstance(keep_best, str) and parse_best(keep_best)[0] == "max" else 1.0
    rated = [
        (sign * row.metric, row.step)
        for row in rows
        if row.metric is not None and math.isfinite(row.metric) and row.run == run
    ]
    if not rated or not isinstance(keep_best, str):
        return tuple(rows)
    best = min(rated)[1]  # the first of equals, as the run itself chooses it
    return tuple(replace(row, is_best=row.step == best and row.run == run) for row in rows)


def _no_such_step(storage: Storage, name: str, path: str) -> CheckpointError:
    if storage.entries(name):
        return CheckpointError(
            f"{path} is not complete",
            why=f"the folder has no {FILE}, which is written last: the save did not end",
            do=f"distributed checkpoint ls {storage.root}",
        )
    others, step = whole_names(storage), step_of(name) or 0
    if not others:
        return CheckpointError(f"there is no checkpoint at {path}", why=_why_missing(path), do=_hint(path))
    close = sorted(others, key=lambda other: abs((step_of(other) or 0) - step))[:3]
    return CheckpointError(
        f"there is no checkpoint at {path}",
        why=f"{storage.root} has {len(others)} others",
        do=f"the nearest are {_join(sorted(close))}",
    )


def _why_missing(url: str) -> str:
    return "the folder is empty" if os.path.isdir(url) else "the path does not exist"


def _hint(url: str) -> str:
    """Names beside a path that is not there, of what holds checkpoints."""
    above, _, name = url.rstrip("/").rpartition("/")
    if above.endswith(":/") or (not above and url.startswith("/")):
        return "check the path"
    try:
        beside = [child for child in open_storage(above or ".").children() if not child.startswith(".")]
    except CheckpointError:
        beside = []
    prefix = f"{above}/" if above else ""
    beside = [child for child in beside[-_MOST_BESIDE:] if step_of(child) is not None or _has_some(prefix + child)]
    close = nearest(name, beside) or [child for child in beside if step_of(child) is not None][-3:]
    if close:
        return f"did you mean {_join((prefix + child for child in close), 'or')}?"
    return f"there are {_join(prefix + child for child in beside[:5])}" if beside else "check the path"


def _has_some(url: str) -> bool:
    try:
        children = open_storage(url).children()
        inner = open_storage(f"{url}/{CHECKPOINTS}").children() if CHECKPOINTS in children else []
    except CheckpointError:
        return False
    return any(step_of(child) is not None for child in (*children, *inner))


def _say(bad: CheckpointError) -> str:
    return f"damaged: {bad.problems[0].why or bad.problems[0].what}"


def _join(names: Iterable[str], word: str = "and") -> str:
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last
