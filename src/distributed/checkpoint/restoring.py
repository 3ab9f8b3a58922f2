"""Restoring: the newest checkpoint that verifies, the same one on every rank, and a report of what came back.

A damaged one is told and the one before it is tried. One of a newer format, or a store that does not answer, is an
error: to go back to an older checkpoint would throw away training that is not lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from distributed.checkpoint.chunks import ChunkStore, Damaged
from distributed.checkpoint.files import Storage
from distributed.checkpoint.gathering import Boxes
from distributed.checkpoint.layout import dtype_name
from distributed.checkpoint.manifest import Manifest, manifest_file, step_name, step_of
from distributed.checkpoint.reading import StateTree, load_parts, open_checkpoint, read_manifest
from distributed.checkpoint.storage import open_storage
from distributed.checkpoint.tree import flatten
from distributed.core.errors import CheckpointError
from distributed.runtime.session import Session

_DAMAGED, _FAILED = 1, 2
_MADE_LATER = "optimizer/state/"  # an optimizer has no state before its first step


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that could be resumed from; whether it is sound is not known yet."""

    root: str
    step: int

    @property
    def path(self) -> str:
        return f"{self.root.rstrip('/')}/{step_name(self.step)}"


@dataclass(frozen=True)
class RestoreReport:
    """What was loaded, what differs from what this run expected, and which checkpoints had to be passed over."""

    path: str
    step: int
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()  # expected by this run, not in the checkpoint
    unexpected: tuple[str, ...] = ()  # in the checkpoint, not expected
    mismatched: tuple[str, ...] = ()  # of another type or shape
    saved_ranks: int = 1
    ranks: int = 1
    skipped: tuple[tuple[str, str], ...] = ()  # path, what is wrong with it

    @property
    def resharded(self) -> bool:
        return self.saved_ranks != self.ranks

    def __str__(self) -> str:
        lines = [f"restored {self.path}: {len(self.loaded)} tensors at step {self.step}"]
        lines += [f"  passed over {path}: {why}" for path, why in self.skipped]
        if self.resharded:
            lines.append(f"  saved by {self.saved_ranks} ranks, loaded by {self.ranks}")
        for label, names in (("missing", self.missing), ("unexpected", self.unexpected), ("differs", self.mismatched)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                lines.append(f"  {label}: {', '.join(names[:5])}{more}")
        return "\n".join(lines)


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


def find(url: str | Storage, resume: bool | str) -> list[Candidate]:
    """Checkpoints to resume from, newest first: those of `url`, or the one or those at the path that `resume` names."""
    if resume is False:
        return []
    if resume is True:
        return _list(open_storage(url))
    if step_of(resume.rstrip("/").rpartition("/")[2]) is not None:
        storage, step = open_checkpoint(resume)
        found = [Candidate(storage.root, step)] if storage.size(manifest_file(step)) is not None else []
    else:
        found = _list(open_storage(resume))
    if not found:
        raise CheckpointError(f"there is no checkpoint at {resume}", do="pass a checkpoint's folder, or one with some")
    return found


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
        report = _report(candidate, manifest, expected, session, skipped)
        return Restored(manifest.step, shared, own, report, manifest, chunks.known)
    if not skipped:
        return None
    raise CheckpointError(
        "no checkpoint can be used" if len(skipped) > 1 else f"the checkpoint {skipped[0][0]} cannot be used",
        why="; ".join(f"{path}: {why}" for path, why in skipped),
        do="resume from another one, or set resume_from_checkpoint=false and another checkpoint_dir to begin anew",
    )


def _load(
    storage: Storage, candidate: Candidate, session: Session, chunks: ChunkStore, boxes: Boxes
) -> tuple[Manifest, StateTree, StateTree | None]:
    manifest = read_manifest(storage, candidate.step)
    (shared,) = load_parts(manifest, [manifest.shared], chunks, boxes=boxes)
    if manifest.world_size != session.world_size:
        return manifest, shared, None
    (own,) = load_parts(manifest, [manifest.own[session.rank]], chunks)
    return manifest, shared, own


def _list(storage: Storage) -> list[Candidate]:
    steps = {step for name in storage.children() if (step := step_of(name)) is not None and name == step_name(step)}
    whole = [step for step in steps if storage.size(manifest_file(step)) is not None]
    return [Candidate(storage.root, step) for step in sorted(whole, reverse=True)]


def _agreed_candidates(
    url: str | Storage, resume: bool | str, session: Session, call: str, accept: Callable[[Manifest], bool]
) -> list[Candidate]:
    """Rank 0 looks, so that all ranks try the same ones in the same order."""
    text = None
    if session.is_main:
        try:
            found = [candidate for candidate in find(url, resume) if _accepts(candidate, accept)]
            text = json.dumps([[candidate.root, candidate.step] for candidate in found])
        except CheckpointError as failed:
            text = json.dumps(
                {"what": failed.problems[0].what, "why": failed.problems[0].why, "do": failed.problems[0].do}
            )
    document: Any = json.loads(session.share_text(f"{call}/candidates", text))
    if isinstance(document, dict):
        raise CheckpointError(document["what"], why=document["why"], do=document["do"])
    return [Candidate(root, step) for root, step in document]


def _accepts(candidate: Candidate, accept: Callable[[Manifest], bool]) -> bool:
    try:
        return accept(read_manifest(open_storage(candidate.root), candidate.step))
    except CheckpointError:  # whether it can be passed over is told when it is loaded
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


def _report(
    candidate: Candidate,
    manifest: Manifest,
    expected: StateTree | None,
    session: Session,
    skipped: list[tuple[str, str]],
) -> RestoreReport:
    stored = {name: (entry.dtype, entry.shape) for name, entry in manifest.shared.tensors.items()}
    live = stored
    if expected is not None:
        live = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in flatten(expected)[0].items()}
    return RestoreReport(
        path=candidate.path,
        step=manifest.step,
        loaded=tuple(name for name in stored if name in live),
        missing=tuple(name for name in live if name not in stored),
        unexpected=tuple(name for name in stored if name not in live and not name.startswith(_MADE_LATER)),
        mismatched=tuple(
            f"{name} is {_kind(stored[name])} in the checkpoint and {_kind(live[name])} here"
            for name in live
            if name in stored and stored[name] != live[name]
        ),
        saved_ranks=manifest.world_size,
        ranks=session.world_size,
        skipped=tuple(skipped),
    )


def _kind(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]} {list(spec[1])}"
