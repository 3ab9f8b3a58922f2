"""Assembly: what each rank has stored becomes one manifest; every chunk must be accounted for exactly once."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from distributed.checkpoint.digests import canonical, combine_blocks, digest_json
from distributed.checkpoint.layout import ChunkPlan, byte_size, dtype_name, plan_chunks
from distributed.checkpoint.manifest import FORMAT, Manifest, Part, Piece, Ref, TensorEntry, render_part
from distributed.checkpoint.parsing import component_digests, parse_chunks, parse_json, parse_part
from distributed.checkpoint.tree import flatten
from distributed.core.errors import CheckpointError


@dataclass(frozen=True)
class Outline:
    """A tree without its bytes: names, types, shapes, scalars, and the chunks that its bytes go into."""

    skeleton: dict[str, Any]
    specs: Mapping[str, tuple[str, tuple[int, ...]]]  # name → dtype, shape
    plan: tuple[ChunkPlan, ...]

    @property
    def signature(self) -> str:
        """The same on two ranks exactly when they would make the same chunks."""
        return digest_json([[name, dtype, list(shape)] for name, (dtype, shape) in self.specs.items()])

    @property
    def nbytes(self) -> int:
        return sum(chunk.length for chunk in self.plan)


@dataclass(frozen=True)
class StoredChunk:
    """Where a planned chunk went: its digest, and one for each stretch of a tensor in it."""

    digest: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class RankPart:
    """What one rank stored: chunks of the shared tree by their place in the plan, and its own tree."""

    rank: int
    signature: str
    shared: Mapping[int, StoredChunk]
    own: Part
    own_chunks: Mapping[str, int]
    written_bytes: int


def outline(tree: Mapping[str, Any], before: Outline | None = None) -> tuple[Outline, dict[str, torch.Tensor]]:
    """A tree's outline, and its tensors by name. The plan of the one `before` is taken over where it still fits."""
    tensors, skeleton = flatten(dict(tree))
    for name, tensor in tensors.items():
        byte_size(name, tensor)  # refuses what cannot be stored
    specs = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    if not all(isinstance(key, str) for key in tree):
        raise CheckpointError("the keys of a state must be texts", do="name its components: model, optimizer, …")
    fits = before is not None and before.specs == specs and list(before.specs) == list(specs)
    plan = before.plan if fits and before is not None else tuple(plan_chunks(tensors))
    return Outline(skeleton, specs, plan), tensors


def build_part(tree: Outline, stored: Sequence[StoredChunk]) -> tuple[Part, dict[str, int]]:
    """A tree whose planned chunks are all stored, and the lengths of these chunks."""
    refs: dict[str, list[tuple[int, Ref, str]]] = {name: [] for name in tree.specs}
    for chunk, done in zip(tree.plan, stored, strict=True):
        for stretch, block in zip(chunk.stretches, done.blocks, strict=True):
            refs[stretch.tensor].append((stretch.start, Ref(done.digest, stretch.offset, stretch.length), block))
    tensors = {}
    for name, (dtype, shape) in tree.specs.items():
        runs = sorted(refs[name], key=lambda run: run[0])
        digest = combine_blocks(dtype, shape, [block for _, _, block in runs])
        tensors[name] = TensorEntry(dtype, shape, (Piece(tuple(ref for _, ref, _ in runs)),), digest)
    lengths = {done.digest: chunk.length for chunk, done in zip(tree.plan, stored, strict=True)}
    return Part(tree.skeleton, tensors), lengths


def render_rank_part(part: RankPart) -> bytes:
    return canonical(
        {
            "format": FORMAT,
            "rank": part.rank,
            "signature": part.signature,
            "shared": [[index, done.digest, list(done.blocks)] for index, done in part.shared.items()],
            "own": render_part(part.own),
            "own_chunks": dict(part.own_chunks),
            "written_bytes": part.written_bytes,
        }
    )


def parse_rank_part(text: bytes, where: str) -> RankPart:
    """Only for a text whose digest was told by the rank that wrote it."""
    document = parse_json(text, where)
    chunks = parse_chunks(document["own_chunks"], where)
    return RankPart(
        document["rank"],
        document["signature"],
        {index: StoredChunk(digest, tuple(blocks)) for index, digest, blocks in document["shared"]},
        parse_part(document["own"], chunks, where),
        chunks,
        document["written_bytes"],
    )


def assemble(
    step: int, shared: Outline, parts: Sequence[RankPart], meta: Mapping[str, Any], metric: float | None
) -> Manifest:
    """The manifest of a checkpoint whose parts are all stored."""
    for part in parts:
        if part.signature != shared.signature:
            raise CheckpointError(
                f"rank {part.rank} holds another state than rank 0: its tensors' names, types or shapes differ",
                why="ranks write one checkpoint together, each a part of what all share",
                do="make the same model and optimizer on every rank",
            )
    stored = {index: done for part in parts for index, done in part.shared.items()}
    assert sorted(stored) == list(range(len(shared.plan))), "every chunk belongs to one rank"
    whole, chunks = build_part(shared, [stored[index] for index in range(len(shared.plan))])
    own = tuple(part.own for part in parts)
    for part in parts:
        chunks |= part.own_chunks
    return Manifest(
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=len(parts),
        shared=whole,
        own=own,
        chunks=chunks,
        digests=component_digests(whole, own),
        versions=versions(),
        meta=meta,
        metric=metric,
    )


def versions() -> dict[str, str]:
    try:
        library = version("distributed-training")
    except PackageNotFoundError:  # run from a source tree that is not installed
        library = "unknown"
    return {"python": platform.python_version(), "torch": torch.__version__, "distributed-training": library}
