"""Fetching: what a checkpoint's chunks hold, each read once and verified, into memory that is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distributed.checkpoint.format.manifest import Manifest, Part
from distributed.checkpoint.format.skeleton import unflatten
from distributed.checkpoint.restore.gathering import Boxes, ChunkRun, Gathering, Memory
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.core.errors import CheckpointError
from distributed.runtime.host_memory import free_host_memory

StateTree = dict[str, Any]
Progress = Callable[[int, int], None]  # bytes read, bytes to read
_READERS = 4


def fetch_parts(
    manifest: Manifest,
    parts: Sequence[Part],
    chunks: ChunkStore,
    memory: Memory,
    progress: Progress = lambda done, total: None,
    *,
    boxes: Boxes = lambda name, shape: None,
) -> list[StateTree]:
    """These parts as trees. Nothing is allocated before the chunks are known to be there and the sum to fit.

    Of a tensor for which `boxes` names some, these alone are read, and stand in the tree as a shard.
    """
    wanted = [
        {name: Gathering(name, entry, boxes(name, entry.shape), memory) for name, entry in part.tensors.items()}
        for part in parts
    ]
    runs: dict[str, list[tuple[Gathering, ChunkRun]]] = {}
    everything = [gathering for by_name in wanted for gathering in by_name.values()]
    for gathering in everything:
        for run in gathering.runs:
            runs.setdefault(run.ref.chunk, []).append((gathering, run))
    lengths = {digest: manifest.chunks[digest] for digest in runs}
    chunks.check_sizes(lengths)
    _check_memory(sum(gathering.nbytes for gathering in everything))
    for gathering in everything:
        gathering.allocate()
    _fill(runs, lengths, chunks, progress)
    results = [{name: gathering.result for name, gathering in by_name.items()} for by_name in wanted]
    return [dict(unflatten(part.skeleton, found)) for part, found in zip(parts, results, strict=True)]


def _fill(
    runs: dict[str, list[tuple[Gathering, ChunkRun]]], lengths: dict[str, int], chunks: ChunkStore, progress: Progress
) -> None:
    """Read every chunk once, verify it, and copy from it to wherever its bytes belong."""

    def fetch(digest: str) -> int:
        data = chunks.get(digest, lengths[digest])
        for gathering, run in runs[digest]:
            gathering.take(run, data)
        return lengths[digest]

    total, done = sum(lengths.values()), 0
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-reader") as readers:
        try:
            for length in readers.map(fetch, runs):
                done += length
                progress(done, total)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise


def _check_memory(needed: int) -> None:
    free = free_host_memory()
    if needed > free:
        raise CheckpointError(
            f"loading the checkpoint takes {needed / 2**30:.1f} GiB, and this machine has {free / 2**30:.1f} GiB free",
            why="a chunk can be used many times, so a small checkpoint can become a large state",
            do="load it on a larger machine; if it should be small, do not trust it",
        )
