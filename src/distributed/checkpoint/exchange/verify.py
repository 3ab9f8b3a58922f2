"""Verify: every chunk of one or many checkpoints is read and hashed once, and what is damaged is named."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from distributed.checkpoint.format.manifest import Manifest
from distributed.checkpoint.format.parsing import Damaged, NewerFormat
from distributed.checkpoint.restore.fetching import Progress
from distributed.checkpoint.restore.reading import Verified
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.checkpoint.storage.files import Storage
from distributed.checkpoint.storage.manifests import read_manifest
from distributed.core.errors import CheckpointError

_READERS = 4


@dataclass(frozen=True)
class _Chunk:
    digest: str
    length: int
    users: tuple[int, ...]  # places of the checkpoints that refer to it


def verify_all(
    checkpoints: Sequence[tuple[str, Storage, str]], *, progress: Progress = lambda done, total: None
) -> list[Verified]:
    """A verdict for each of some checkpoints of one storage; a chunk that several share is read once."""
    manifests: dict[int, Manifest] = {}
    problems: dict[int, list[str]] = {place: [] for place in range(len(checkpoints))}
    for place, (_, storage, name) in enumerate(checkpoints):
        try:
            manifests[place] = read_manifest(storage, name)
        except NewerFormat as newer:
            problems[place].append(f"{_line(newer)}; {newer.problems[0].do}")
        except Damaged as bad:  # a store that does not answer is not damage, and is raised
            problems[place].append(_line(bad))
    wanted = _chunks(manifests)
    total, done = sum(chunk.length for chunk in wanted), 0
    stores = ChunkStore(checkpoints[0][1]) if checkpoints else None

    def check(chunk: _Chunk) -> str:
        assert stores is not None
        try:
            stores.get(chunk.digest, chunk.length)
        except Damaged as bad:
            return _line(bad)
        return ""

    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-verifier") as readers:
        for chunk, wrong in zip(wanted, readers.map(check, wanted), strict=True):
            for place in chunk.users if wrong else ():
                names = ", ".join(tensors_in(manifests[place], chunk.digest))
                problems[place].append(f"{wrong}; it holds {names}")
            done += chunk.length
            progress(done, total)
    return [
        Verified(
            path,
            len(manifests[place].chunks) if place in manifests else 0,
            sum(manifests[place].chunks.values()) if place in manifests else 0,
            tuple(problems[place]),
        )
        for place, (path, _, _) in enumerate(checkpoints)
    ]


def tensors_in(manifest: Manifest, digest: str) -> list[str]:
    """The names of all tensors that a chunk holds bytes of."""
    labelled = [("", manifest.shared), *((f"rank-{rank}/", part) for rank, part in enumerate(manifest.own))]
    return [
        prefix + name
        for prefix, part in labelled
        for name, entry in part.tensors.items()
        if any(ref.chunk == digest for piece in entry.pieces for ref in piece.refs)
    ]


def _chunks(manifests: dict[int, Manifest]) -> list[_Chunk]:
    """Two manifests can state different lengths for one name, and then one of them is wrong: both are looked at."""
    users: dict[tuple[str, int], list[int]] = {}
    for place, manifest in manifests.items():
        for digest, length in manifest.chunks.items():
            users.setdefault((digest, length), []).append(place)
    return [_Chunk(digest, length, tuple(places)) for (digest, length), places in users.items()]


def _line(bad: CheckpointError) -> str:
    first = bad.problems[0]
    return f"{first.what}: {first.why}" if first.why else first.what
