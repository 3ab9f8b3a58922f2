"""Assembly: what each rank has stored becomes one manifest; every chunk must be accounted for exactly once.

Of tensors that all ranks hold, each writes its share of the chunks. Of those that they hold in parts, each writes the
boxes that it stores, and these must make up the whole.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from distributed.checkpoint.format.boxes import find_fault
from distributed.checkpoint.format.digests import canonical, combine_blocks, combine_boxes
from distributed.checkpoint.format.layout import ChunkPlan
from distributed.checkpoint.format.manifest import FORMAT, SHARD, Manifest, Part, Piece, Ref, TensorEntry, render_part
from distributed.checkpoint.format.parsing import component_digests, parse_chunks, parse_json, parse_part
from distributed.checkpoint.format.tree_spec import TreeSpec
from distributed.core.errors import CheckpointError
from distributed.core.registry import DISTRIBUTION, installed_version
from distributed.runtime.tensor_shard import Box, whole_box


@dataclass(frozen=True)
class StoredChunk:
    """Where a planned chunk went: its digest, and one for each byte range of a tensor in it."""

    digest: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class StoredBox:
    """Where a box of a tensor went: its bytes in order, with a digest for each run of them."""

    tensor: str
    box: Box
    refs: tuple[Ref, ...]
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class RankPart:
    """What one rank stored: chunks of the shared tree by their place in the plan, boxes of it, and its own tree."""

    rank: int
    signature: str
    shared: Mapping[int, StoredChunk]
    own: Part
    chunks: Mapping[str, int]  # of its boxes and its own tree
    written_bytes: int
    boxes: tuple[StoredBox, ...] = ()


def build_part(
    tree: TreeSpec, stored: Sequence[StoredChunk], boxes: Iterable[StoredBox] = ()
) -> tuple[Part, dict[str, int]]:
    """A tree whose planned chunks and boxes are all stored, and the lengths of the planned chunks."""
    runs = _runs(tree.plan, stored)
    by_name: dict[str, list[StoredBox]] = {name: [] for name in tree.split}
    for box in boxes:
        by_name[box.tensor].append(box)
    tensors = {}
    for name, (dtype, shape) in tree.specs.items():
        if name in tree.split:
            tensors[name] = _join(name, dtype, shape, by_name[name])
        else:
            refs, blocks = runs.get(name, ((), ()))
            tensors[name] = TensorEntry(dtype, shape, (Piece(refs),), combine_blocks(dtype, shape, blocks))
    return Part(tree.skeleton, tensors), chunk_lengths(tree.plan, stored)


def stored_boxes(tree: TreeSpec, stored: Sequence[StoredChunk]) -> tuple[StoredBox, ...]:
    """The boxes of this rank, whose planned chunks are all stored."""
    runs = _runs(tree.box_plan, stored)
    return tuple(StoredBox(name, box, *runs[label]) for label, (name, box) in tree.boxes.items() if label in runs)


def chunk_lengths(plan: Sequence[ChunkPlan], stored: Sequence[StoredChunk]) -> dict[str, int]:
    return {done.digest: chunk.length for chunk, done in zip(plan, stored, strict=True)}


def part_chunks(part: RankPart) -> set[str]:
    """The digests of all that a rank stored."""
    return {done.digest for done in part.shared.values()} | set(part.chunks)


def render_rank_part(part: RankPart) -> bytes:
    return canonical(
        {
            "format": FORMAT,
            "rank": part.rank,
            "signature": part.signature,
            "shared": [[index, done.digest, list(done.blocks)] for index, done in part.shared.items()],
            "boxes": [
                [done.tensor, done.box, [[ref.chunk, ref.offset, ref.length] for ref in done.refs], done.blocks]
                for done in part.boxes
            ],
            "own": render_part(part.own),
            "chunks": dict(part.chunks),
            "written_bytes": part.written_bytes,
        }
    )


def parse_rank_part(text: bytes, where: str) -> RankPart:
    """Only for a text whose digest came from the rank that wrote it."""
    document = parse_json(text, where)
    chunks = parse_chunks(document["chunks"], where)
    return RankPart(
        document["rank"],
        signature=document["signature"],
        shared={index: StoredChunk(digest, tuple(blocks)) for index, digest, blocks in document["shared"]},
        own=parse_part(document["own"], chunks, where),
        chunks=chunks,
        written_bytes=document["written_bytes"],
        boxes=tuple(
            StoredBox(
                name, tuple((start, stop) for start, stop in box), tuple(Ref(*ref) for ref in refs), tuple(blocks)
            )
            for name, box, refs, blocks in document["boxes"]
        ),
    )


def assemble(
    step: int,
    shared: TreeSpec,
    parts: Sequence[RankPart],
    *,
    meta: Mapping[str, Any],
    metric: float | None,
    frameworks: Mapping[str, str],
) -> Manifest:
    """The manifest of a checkpoint whose parts are all stored; `frameworks` are versions of what made the state."""
    for part in parts:
        if part.signature != shared.signature:
            raise CheckpointError(
                f"rank {part.rank} holds another state than rank 0: its tensors' names, types or shapes differ",
                why="the ranks write one checkpoint together, each a shard of the same state",
                do="make the same model and optimizer on every rank",
            )
    stored = {index: done for part in parts for index, done in part.shared.items()}
    assert sorted(stored) == list(range(len(shared.plan))), "every chunk belongs to one rank"
    boxes = [box for part in parts for box in part.boxes]
    whole, chunks = build_part(shared, [stored[index] for index in range(len(shared.plan))], boxes)
    own = tuple(part.own for part in parts)
    for part in parts:
        chunks |= part.chunks
    return Manifest(
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=len(parts),
        shared=whole,
        own=own,
        chunks=chunks,
        digests=component_digests(whole, own),
        versions=versions_with(frameworks),
        meta=meta,
        metric=metric,
    )


def _runs(
    plan: Sequence[ChunkPlan], stored: Sequence[StoredChunk]
) -> dict[str, tuple[tuple[Ref, ...], tuple[str, ...]]]:
    """By what is stored: where its bytes are, in their order, and a digest for each run of them."""
    found: dict[str, list[tuple[int, Ref, str]]] = {}
    for chunk, done in zip(plan, stored, strict=True):
        for byte_range, block in zip(chunk.ranges, done.blocks, strict=True):
            run = (byte_range.start, Ref(done.digest, byte_range.offset, byte_range.length), block)
            found.setdefault(byte_range.tensor, []).append(run)
    ordered = {name: sorted(runs, key=lambda run: run[0]) for name, runs in found.items()}
    return {name: (tuple(run[1] for run in runs), tuple(run[2] for run in runs)) for name, runs in ordered.items()}


def _join(name: str, dtype: str, shape: tuple[int, ...], boxes: Iterable[StoredBox]) -> TensorEntry:
    """A tensor from all ranks' boxes of it. One that was on one rank is stored as if it had been on all."""
    ordered = sorted(boxes, key=lambda done: done.box)
    fault = find_fault([done.box for done in ordered], shape)
    if fault:
        raise CheckpointError(
            f"the ranks do not store {name} exactly once: {fault}",
            why=f"the tensor is {dtype} {list(shape)}, and every element must be in one box of one rank that stores it",
            do="let each box be stored by one of the ranks that have it",
        )
    digest = combine_boxes(dtype, shape, [(done.box, done.blocks) for done in ordered])
    if not ordered or ordered[0].box == whole_box(shape):
        return TensorEntry(dtype, shape, (Piece(ordered[0].refs if ordered else ()),), digest)
    return TensorEntry(dtype, shape, tuple(Piece(done.refs, done.box) for done in ordered), digest, SHARD)


def versions_with(frameworks: Mapping[str, str]) -> dict[str, str]:
    """Of Python, of what made the state, and of this library."""
    return {"python": platform.python_version(), **frameworks, DISTRIBUTION: installed_version()}
