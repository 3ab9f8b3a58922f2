"""Reading: a stored checkpoint as trees of torch's tensors; and its verification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distributed.checkpoint.format.manifest import Manifest, Part
from distributed.checkpoint.format.parsing import Damaged
from distributed.checkpoint.format.tensors import TensorMemory
from distributed.checkpoint.restore.fetching import Progress, StateTree, fetch_parts
from distributed.checkpoint.restore.gathering import Boxes
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.manifests import open_checkpoint, read_manifest
from distributed.core.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """A whole checkpoint in memory."""

    manifest: Manifest
    shared: StateTree
    own: dict[int, StateTree]  # by rank


@dataclass(frozen=True)
class Verified:
    """What a verification found; sound when there is no problem."""

    path: str
    chunks: int
    total_bytes: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        if not self.problems:
            return f"{self.path}: sound ({self.chunks} chunks, {self.total_bytes / 2**20:.1f} MiB)"
        return "\n".join([f"{self.path}: {len(self.problems)} problems", *(f"- {text}" for text in self.problems)])


def load(path: str, *, ranks: Iterable[int] | None = None, progress: Progress = lambda done, total: None) -> Loaded:
    """Everything that a checkpoint holds, on the CPU; `ranks` narrows whose own parts are read."""
    storage, name = open_checkpoint(path)
    manifest = read_manifest(storage, name)
    chosen = [rank for rank in (range(manifest.world_size) if ranks is None else ranks) if rank < manifest.world_size]
    parts = [manifest.shared, *(manifest.own[rank] for rank in chosen)]
    shared, *own = load_parts(manifest, parts, ChunkStore(storage), progress)
    return Loaded(manifest, shared, dict(zip(chosen, own, strict=True)))


def verify(path: str, *, progress: Progress = lambda done, total: None) -> Verified:
    """Read every byte of a checkpoint and report everything that is wrong with it."""
    storage, name = open_checkpoint(path)
    try:
        manifest = read_manifest(storage, name)
    except CheckpointError as bad:
        return Verified(path, 0, 0, (str(bad),))
    chunks, total, problems, done = ChunkStore(storage), sum(manifest.chunks.values()), [], 0
    for digest, length in manifest.chunks.items():
        try:
            chunks.get(digest, length)
        except Damaged as bad:
            problems.append(f"{bad.problems[0].what}: {bad.problems[0].why} ({', '.join(_users(manifest, digest))})")
        done += length
        progress(done, total)
    return Verified(path, len(manifest.chunks), manifest.nbytes, tuple(problems))


def load_parts(
    manifest: Manifest,
    parts: Sequence[Part],
    chunks: ChunkStore,
    progress: Progress = lambda done, total: None,
    *,
    boxes: Boxes = lambda name, shape: None,
) -> list[StateTree]:
    """These parts as trees of torch's tensors; boxes of a tensor stand in them as a Portion."""
    return fetch_parts(manifest, parts, chunks, TensorMemory(), progress, boxes=boxes)


def _users(manifest: Manifest, digest: str) -> list[str]:
    """The tensors that a chunk belongs to."""
    labelled = [("", manifest.shared), *((f"rank-{rank}/", part) for rank, part in enumerate(manifest.own))]
    names = [
        prefix + name
        for prefix, part in labelled
        for name, entry in part.tensors.items()
        if any(ref.chunk == digest for piece in entry.pieces for ref in piece.refs)
    ]
    return names[:3] + ([f"and {len(names) - 3} more"] if len(names) > 3 else [])
