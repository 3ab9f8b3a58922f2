"""Candidates: the checkpoints that a run could resume from, newest first, and the report of the one that it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed.checkpoint.format.manifest import Manifest, manifest_file, step_of
from distributed.checkpoint.storage.files import Storage
from distributed.checkpoint.storage.lineage import newest_first
from distributed.checkpoint.storage.manifests import open_checkpoint
from distributed.checkpoint.storage.urls import open_storage
from distributed.core.errors import CheckpointError, first_of

_MADE_LATER = (
    "optimizer/state/",
    "data/",
    "loss_fn/",
    "nonpersistent/",
    "callbacks/",
    "copies/",
)  # by the first step, or by a later one


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that could be resumed from; whether it is sound is not known yet."""

    root: str
    name: str

    @property
    def step(self) -> int:
        return step_of(self.name) or 0

    @property
    def path(self) -> str:
        return f"{self.root.rstrip('/')}/{self.name}"


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

    @property
    def is_clean(self) -> bool:
        """Whether the newest one was taken, whole."""
        return not (self.skipped or self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = [f"restored {self.path}: {len(self.loaded)} tensors at step {self.step}"]
        lines += [f"  passed over {path}: {why}" for path, why in self.skipped]
        if self.resharded:
            lines.append(f"  saved by {self.saved_ranks} ranks, loaded by {self.ranks}")
        for label, names in (("missing", self.missing), ("unexpected", self.unexpected), ("differs", self.mismatched)):
            if names:
                lines.append(f"  {label}: {first_of(names, 5)}")
        return "\n".join(lines)


def find(url: str | Storage, resume: bool | str) -> list[Candidate]:
    """Checkpoints to resume from, newest first: those of `url`, or the one or those at the path that `resume` names."""
    if resume is False:
        return []
    if resume is True:
        return _list(open_storage(url))
    if step_of(resume.rstrip("/").rpartition("/")[2]) is not None:
        storage, name = open_checkpoint(resume)
        found = [Candidate(storage.root, name)] if storage.size(manifest_file(name)) is not None else []
    else:
        found = _list(open_storage(resume))
    if not found:
        raise CheckpointError(f"there is no checkpoint at {resume}", do=f"distributed checkpoint ls {resume}")
    return found


def report_on(
    candidate: Candidate,
    manifest: Manifest,
    expected: Mapping[str, tuple[str, tuple[int, ...]]] | None,
    ranks: int,
    skipped: Sequence[tuple[str, str]],
) -> RestoreReport:
    """`expected` are the names, types and shapes of the live state; None: those that are stored."""
    stored = {name: (entry.dtype, entry.shape) for name, entry in manifest.shared.tensors.items()}
    live = stored if expected is None else expected
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
        ranks=ranks,
        skipped=tuple(skipped),
    )


def _list(storage: Storage) -> list[Candidate]:
    return [Candidate(storage.root, name) for name in newest_first(storage)]


def _kind(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]} {list(spec[1])}"


def none_usable(skipped: Sequence[tuple[str, str]]) -> CheckpointError:
    """There are checkpoints, and none of them is sound."""
    return CheckpointError(
        "no checkpoint can be used" if len(skipped) > 1 else f"the checkpoint {skipped[0][0]} cannot be used",
        why="; ".join(f"{path}: {why}" for path, why in skipped),
        do="resume from another one, or start at step 0: resume_from_checkpoint=false and another checkpoint_dir",
    )
