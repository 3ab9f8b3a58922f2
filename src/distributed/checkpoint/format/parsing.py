"""Parsing: a manifest from untrusted text; every name, number and size is checked before it is used.

A bad one raises `Damaged` with the place and the reason. Nothing is allocated from a number that stands in it: sizes
are compared with each other here, and with the stored chunks before a load.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from distributed.checkpoint.format.boxes import MAX_DIMS, find_fault
from distributed.checkpoint.format.digests import digest_json, digest_skeletons
from distributed.checkpoint.format.layout import CHUNK_BYTES, ITEM_BYTES
from distributed.checkpoint.format.manifest import FORMAT, REPLICATE, SHARD, Manifest, Part, Piece, Ref, TensorEntry
from distributed.checkpoint.format.skeleton import check_skeleton
from distributed.core.errors import CheckpointError

MAX_TEXT_BYTES = 256 * 2**20
_MAX_RANKS = 2**20
_MAX_DIMS = 64
_MAX_NUMBER = 2**60
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEADER = {"format", "step", "created", "world_size", "versions", "meta", "metric", "digests", "digest"}
_KEYS = _HEADER | {"chunks", "shared", "own"}


class Damaged(CheckpointError):
    """A checkpoint is not what was saved: the one before it may be used."""


class NewerFormat(CheckpointError):
    """Written by a later version of this library; an older checkpoint is not silently used in its place."""


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Raises Damaged, or NewerFormat, unless all of it is sound."""
    document = parse_json(text, where)
    check = _Checks(where)
    if not isinstance(document, dict):
        check.fail("it is not a JSON object")
    check_format(document.get("format"), where)
    if document.keys() != _KEYS:
        check.fail(f"its keys differ by {sorted(map(str, document.keys() ^ _KEYS))[:5]}")
    claimed = document.pop("digest")
    if digest_json(document) != claimed:
        check.fail("its content does not have the digest that it states")
    try:
        return _manifest(document, check)
    except RecursionError:
        check.fail("it is nested too deeply")


def parse_json(text: bytes, where: str) -> Any:
    """JSON of a bounded size and depth, in which no key stands twice."""
    check = _Checks(where)
    if len(text) > MAX_TEXT_BYTES:
        check.fail(f"it is longer than {MAX_TEXT_BYTES} bytes")
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        check.fail("it is nested too deeply")
    except ValueError as bad:
        check.fail(str(bad)[:200])


def check_format(number: Any, where: str) -> None:
    if isinstance(number, int) and not isinstance(number, bool) and number > FORMAT:
        raise NewerFormat(
            f"{where} has format {number}, and this version reads up to {FORMAT}",
            why="a later version of distributed-training wrote it",
            do="pip install --upgrade distributed-training, or resume from a checkpoint of this version",
        )
    if number != FORMAT or isinstance(number, bool):
        _Checks(where).fail(f"its format is {str(number)[:40]!r}, and this version reads {FORMAT}")


def parse_part(document: Any, chunks: Mapping[str, int], where: str) -> Part:
    """A tree, and where its tensors lie in chunks of these lengths."""
    check = _Checks(where)
    check.keys(document, {"skeleton", "tensors"}, where)
    check.kind(document["tensors"], dict, "tensors")
    check.kind(document["skeleton"], dict, "skeleton")
    tensors = {name: _tensor(name, entry, chunks, check) for name, entry in document["tensors"].items()}
    try:
        check_skeleton(document["skeleton"], tensors)
    except ValueError as bad:
        check.fail(str(bad))
    return Part(document["skeleton"], tensors)


def parse_chunks(document: Any, where: str) -> dict[str, int]:
    check = _Checks(where)
    check.kind(document, dict, "chunks")
    for digest, length in document.items():
        check.digest(digest, "a chunk's name")
        check.number(length, f"the length of the chunk {digest[:12]}", 1, CHUNK_BYTES)
    return dict(document)


def _manifest(document: dict[str, Any], check: _Checks) -> Manifest:
    world_size = check.number(document["world_size"], "world_size", 1, _MAX_RANKS)
    check.kind(document["own"], list, "own")
    if len(document["own"]) != world_size:
        check.fail(f"it has parts of {len(document['own'])} ranks, and world_size is {world_size}")
    for key in ("versions", "meta", "digests"):
        check.kind(document[key], dict, key)
    check.kind(document["created"], str, "created")
    metric = document["metric"]
    if metric is not None and (not isinstance(metric, int | float) or isinstance(metric, bool)):
        check.fail("metric is not a number")
    chunks = parse_chunks(document["chunks"], check.where)
    shared = parse_part(document["shared"], chunks, f"the shared part of {check.where}")
    own = tuple(
        parse_part(part, chunks, f"rank {rank}'s part of {check.where}") for rank, part in enumerate(document["own"])
    )
    parts = (shared, *own)
    used = {ref.chunk for part in parts for entry in part.tensors.values() for p in entry.pieces for ref in p.refs}
    if used != chunks.keys():
        check.fail(f"it lists {len(chunks)} chunks and refers to {len(used)}")
    if component_digests(shared, own) != document["digests"]:
        check.fail("the digests of its components do not fit its tensors")
    return Manifest(
        step=check.number(document["step"], "step", 0, _MAX_NUMBER),
        created=document["created"],
        world_size=world_size,
        shared=shared,
        own=own,
        chunks=chunks,
        digests=document["digests"],
        versions={str(name): str(version) for name, version in document["versions"].items()},
        meta=document["meta"],
        metric=None if metric is None else float(metric),
    )


def component_digests(shared: Part, own: tuple[Part, ...]) -> dict[str, str]:
    """By component: `model`, `optimizer` …, and `rank-0/rng` … for what belongs to a rank."""
    digests = digest_skeletons(shared.skeleton, {name: entry.digest for name, entry in shared.tensors.items()})
    for rank, part in enumerate(own):
        of_rank = digest_skeletons(part.skeleton, {name: entry.digest for name, entry in part.tensors.items()})
        digests |= {f"rank-{rank}/{name}": digest for name, digest in of_rank.items()}
    return digests


def _tensor(name: str, document: Any, chunks: Mapping[str, int], check: _Checks) -> TensorEntry:
    what = f"the tensor {name[:80]!r}"
    if "\0" in name or name.startswith("/") or ".." in name.split("/"):
        check.fail(f"{what} has a name that could be taken for a path elsewhere")
    check.keys(document, {"dtype", "shape", "placement", "digest", "pieces"}, what)
    if not isinstance(document["dtype"], str) or document["dtype"] not in ITEM_BYTES:
        check.fail(f"{what} has the type {str(document['dtype'])[:40]!r}, which is not one of a tensor")
    if document["placement"] not in (REPLICATE, SHARD):
        check.fail(f"{what} has an unknown placement")
    check.digest(document["digest"], f"the digest of {what}")
    check.kind(document["shape"], list, f"the shape of {what}")
    if len(document["shape"]) > _MAX_DIMS:
        check.fail(f"{what} has {len(document['shape'])} dimensions")
    shape = tuple(check.number(length, f"the shape of {what}", 0, _MAX_NUMBER) for length in document["shape"])
    itemsize = ITEM_BYTES[document["dtype"]]
    if math.prod(length for length in shape if length) * itemsize > _MAX_NUMBER:
        check.fail(f"{what} has an absurd shape")
    check.kind(document["pieces"], list, f"the pieces of {what}")
    pieces = tuple(
        _piece(piece, shape, itemsize, chunks=chunks, what=what, check=check) for piece in document["pieces"]
    )
    _check_cover(pieces, shape, document["placement"], what, check)
    return TensorEntry(document["dtype"], shape, pieces, document["digest"], document["placement"])


def _piece(
    document: Any, shape: tuple[int, ...], itemsize: int, *, chunks: Mapping[str, int], what: str, check: _Checks
) -> Piece:
    check.keys(document, {"ranges", "refs"}, f"a piece of {what}")
    ranges = None
    box = shape
    if document["ranges"] is not None:
        check.kind(document["ranges"], list, f"the ranges of {what}")
        if len(document["ranges"]) != len(shape):
            check.fail(f"a piece of {what} has another number of dimensions")
        ranges = tuple(
            _range(pair, length, what, check) for pair, length in zip(document["ranges"], shape, strict=True)
        )
        box = tuple(stop - start for start, stop in ranges)
    check.kind(document["refs"], list, f"the pieces of {what}")
    refs = tuple(_ref(ref, chunks, what, check) for ref in document["refs"])
    held, needed = sum(ref.length for ref in refs), math.prod(box) * itemsize
    if held != needed:
        check.fail(f"a piece of {what} needs {needed} bytes and refers to {held}")
    return Piece(refs, ranges)


def _ref(document: Any, chunks: Mapping[str, int], what: str, check: _Checks) -> Ref:
    if not isinstance(document, list) or len(document) != 3:
        check.fail(f"{what} refers to a chunk in an unknown way")
    digest = check.digest(document[0], f"a chunk of {what}")
    if digest not in chunks:
        check.fail(f"{what} refers to the chunk {digest[:12]}, which is not listed")
    offset = check.number(document[1], f"an offset of {what}", 0, CHUNK_BYTES)
    length = check.number(document[2], f"a length of {what}", 1, CHUNK_BYTES)
    if offset + length > chunks[digest]:
        check.fail(f"{what} refers past the end of the chunk {digest[:12]}")
    return Ref(digest, offset, length)


def _range(document: Any, length: int, what: str, check: _Checks) -> tuple[int, int]:
    if not isinstance(document, list) or len(document) != 2:
        check.fail(f"a range of {what} is not a pair")
    start = check.number(document[0], f"a range of {what}", 0, length)
    return start, check.number(document[1], f"a range of {what}", start + 1, length)


def _check_cover(pieces: tuple[Piece, ...], shape: tuple[int, ...], placement: str, what: str, check: _Checks) -> None:
    """Every element is in exactly one piece."""
    if placement == REPLICATE:
        if len(pieces) != 1 or pieces[0].ranges is not None:
            check.fail(f"{what} is replicated and must be one whole piece")
        return
    boxes = [piece.ranges for piece in pieces if piece.ranges is not None]
    if len(boxes) != len(pieces) or len(shape) > MAX_DIMS:
        check.fail(f"{what} is sharded and its {len(pieces)} pieces must have ranges, of at most {MAX_DIMS} dimensions")
    fault = find_fault(boxes, shape)
    if fault:
        check.fail(f"the pieces of {what} leave something out or overlap: {fault}")


class _Checks:
    """Looks at single values; a failure says where."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, why: str) -> NoReturn:
        raise Damaged(f"{self.where} is damaged", why=why, do="use an older checkpoint")

    def kind(self, value: Any, kind: type, what: str) -> None:
        if not isinstance(value, kind):
            self.fail(f"{what} is a {type(value).__name__}, not a {kind.__name__}")

    def keys(self, value: Any, keys: set[str], what: str) -> None:
        if not isinstance(value, dict) or value.keys() != keys:
            self.fail(f"{what} does not have the keys {', '.join(sorted(keys))}")

    def number(self, value: Any, what: str, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.fail(f"{what} is {str(value)[:40]}, not a number from {least} to {most}")
        return value

    def digest(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            self.fail(f"{what} is {str(value)[:70]!r}, not a digest of 64 hex digits")
        return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found
