"""Manifest: what a checkpoint holds and where, as plain data, and the text that it is stored as."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.checkpoint.format.digests import digest_json
from distributed.checkpoint.format.layout import ITEM_BYTES

FORMAT = 2
FILE = "manifest.json"
REPLICATE = "replicate"
SHARD = "shard"
_NAME = re.compile(r"step-(\d{6,18})(?:-([0-9a-f]{8}))?")


@dataclass(frozen=True)
class Ref:
    """A run of bytes in a chunk."""

    chunk: str
    offset: int
    length: int


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and where its bytes lie, in row-major order; without ranges it is the whole tensor."""

    refs: tuple[Ref, ...]
    ranges: tuple[tuple[int, int], ...] | None = None  # of every dimension: from, to


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor, however many ranks hold it
    pieces: tuple[Piece, ...]
    digest: str
    placement: str = REPLICATE

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        size = self.item_bytes
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Part:
    """A tree: what all ranks share, or what belongs to one of them."""

    skeleton: dict[str, Any]
    tensors: Mapping[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


@dataclass(frozen=True)
class Manifest:
    step: int
    created: str  # UTC
    world_size: int
    shared: Part
    own: tuple[Part, ...]  # one a rank
    chunks: Mapping[str, int]  # digest → length of every chunk that is referred to
    digests: Mapping[str, str] = field(default_factory=dict)  # "model" …, "rank-0/rng" …
    versions: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)  # settings, plan and what else the saver was given
    metric: float | None = None

    @property
    def nbytes(self) -> int:
        return self.shared.nbytes + sum(part.nbytes for part in self.own)


def step_name(step: int, line: str = "") -> str:
    """The name of a checkpoint; a run that is not the first one of its folder has names of its own, by its line.

    >>> step_name(500), step_name(500, "1f2e3d4c")
    ('step-000500', 'step-000500-1f2e3d4c')
    """
    return f"step-{step:06d}-{line}" if line else f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """
    >>> step_of("step-000500"), step_of("step-000500-1f2e3d4c"), step_of("chunks")
    (500, 500, None)
    """
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match and name == step_name(int(match.group(1)), match.group(2) or "") else None


def line_of(name: str) -> str:
    """
    >>> line_of("step-000500"), line_of("step-000500-1f2e3d4c")
    ('', '1f2e3d4c')
    """
    match = _NAME.fullmatch(name)
    return match.group(2) or "" if match else ""


def manifest_file(name: str) -> str:
    """
    >>> manifest_file("step-000500")
    'step-000500/manifest.json'
    """
    return f"{name}/{FILE}"


def render(manifest: Manifest) -> bytes:
    """The text of manifest.json, with its own digest."""
    document = {
        "format": FORMAT,
        "step": manifest.step,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
        "meta": dict(manifest.meta),
        "metric": manifest.metric,
        "digests": dict(manifest.digests),
        "chunks": dict(manifest.chunks),
        "shared": render_part(manifest.shared),
        "own": [render_part(part) for part in manifest.own],
    }
    document["digest"] = digest_json(document)
    return (json.dumps(document, separators=(",", ":")) + "\n").encode()


def render_part(part: Part) -> dict[str, Any]:
    return {
        "skeleton": part.skeleton,
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "placement": entry.placement,
                "digest": entry.digest,
                "pieces": [
                    {
                        "ranges": None if piece.ranges is None else [list(pair) for pair in piece.ranges],
                        "refs": [[ref.chunk, ref.offset, ref.length] for ref in piece.refs],
                    }
                    for piece in entry.pieces
                ],
            }
            for name, entry in part.tensors.items()
        },
    }
