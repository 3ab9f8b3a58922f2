"""Restoring: the newest checkpoint that verifies, the same one on every rank, and a report of what came back.

A damaged one is reported and the one before it is tried. One of a newer format, or a store that does not answer, is an
error: to go back to an older checkpoint would throw away training that is not lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from distributed.checkpoint.format.manifest import Manifest
from distributed.checkpoint.format.parsing import Damaged
from distributed.checkpoint.format.tensors import dtype_name
from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.restore.candidates import Candidate, RestoreReport, find, none_usable, report_on
from distributed.checkpoint.restore.fetching import StateTree
from distributed.checkpoint.restore.gathering import Boxes
from distributed.checkpoint.restore.reading import load_parts
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.files import Storage
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session

_DAMAGED, _FAILED = 1, 2


@dataclass(frozen=True)
class Restored:
    """A checkpoint as this rank needs it."""

    step: int
    shared: StateTree
    own: StateTree | None  # None when another number of ranks saved it
    report: RestoreReport
    manifest: Manifest
    verified: frozenset[str] = field(repr=False, default=frozenset())  # chunks, for `Saver(known=…)`

    @property
    def path(self) -> str:
        return self.report.path


def restore(
    url: str | Storage,
    resume: bool | str,
    session: Session,
    *,
    expected: StateTree | None = None,
    boxes: Boxes = lambda name, shape: None,
    accept: Callable[[Manifest], bool] = lambda manifest: True,
) -> Restored | None:
    """Every rank calls it. None when nothing is to be resumed; raises when there are checkpoints and none is sound.

    `expected` is the live state: the report then says which names are missing or too many; nothing is changed in it.
    `boxes` says by a tensor's name and whole shape which boxes of it this rank wants: only these are read, and stand in
    `shared` as a Portion; None for all of it, as a tensor. Checkpoints that are not accepted are not looked at.
    """
    call = f"restore-{session.number()}"
    candidates = _agreed_candidates(url, resume, session, call, accept)
    skipped: list[tuple[str, str]] = []
    for number, candidate in enumerate(candidates):
        storage = open_storage(url) if resume is True else open_storage(candidate.root)
        found: tuple[Manifest, StateTree, StateTree | None] | None = None
        chunks, error = ChunkStore(storage), None
        try:
            found = _load(storage, candidate, session, chunks, boxes)
        except CheckpointError as failed:
            error = failed
        problem = _agree(session, f"{call}/{number}", error)
        if problem is not None:
            skipped.append((candidate.path, problem))
            continue
        assert found is not None
        manifest, shared, own = found
        report = report_on(candidate, manifest, _specs(expected), session.world_size, skipped)
        return Restored(manifest.step, shared, own, report, manifest, chunks.known)
    if not skipped:
        return None
    raise none_usable(skipped)


def _specs(expected: StateTree | None) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    if expected is None:
        return None
    return {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in flatten(expected)[0].items()}


def _load(
    storage: Storage, candidate: Candidate, session: Session, chunks: ChunkStore, boxes: Boxes
) -> tuple[Manifest, StateTree, StateTree | None]:
    manifest = read_manifest(storage, candidate.name)
    (shared,) = load_parts(manifest, [manifest.shared], chunks, boxes=boxes)
    if manifest.world_size != session.world_size:
        return manifest, shared, None
    (own,) = load_parts(manifest, [manifest.own[session.rank]], chunks)
    return manifest, shared, own


def _agreed_candidates(
    url: str | Storage, resume: bool | str, session: Session, call: str, accept: Callable[[Manifest], bool]
) -> list[Candidate]:
    """Rank 0 looks, so that all ranks try the same ones in the same order."""
    text = None
    if session.is_main:
        try:
            found = [candidate for candidate in find(url, resume) if _accepts(candidate, accept)]
            text = json.dumps([[candidate.root, candidate.name] for candidate in found])
        except CheckpointError as failed:
            text = json.dumps(
                {"what": failed.problems[0].what, "why": failed.problems[0].why, "do": failed.problems[0].do}
            )
    document: Any = json.loads(session.share_text(f"{call}/candidates", text))
    if isinstance(document, dict):
        raise CheckpointError(document["what"], why=document["why"], do=document["do"])
    return [Candidate(root, name) for root, name in document]


def _accepts(candidate: Candidate, accept: Callable[[Manifest], bool]) -> bool:
    try:
        return accept(read_manifest(open_storage(candidate.root), candidate.name))
    except CheckpointError:  # whether it can be skipped is decided when it is loaded
        return True


def _agree(session: Session, key: str, error: CheckpointError | None) -> str | None:
    """None when every rank could load it, else what is wrong; raises on every rank what must not be passed over."""
    level = 0 if error is None else _DAMAGED if isinstance(error, Damaged) else _FAILED
    mine = level * session.world_size + session.rank if level else -1
    worst = int(session.max("restore", torch.tensor([mine], dtype=torch.int64, device=session.device)).item())
    if worst < 0:
        return None
    level, rank = divmod(worst, session.world_size)
    own = json.dumps([error.problems[0].what, error.problems[0].why, error.problems[0].do]) if error else None
    what, why, do = json.loads(session.share_text(key, own if rank == session.rank else None))
    if level == _FAILED:
        raise CheckpointError(what, why=why, do=do)
    return f"{what} ({why})" if why else str(what)
