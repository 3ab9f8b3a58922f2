"""Files of predictions: shards of safetensors and JSON lines, and an index that is written last.

    rank-00000/shard-000000.safetensors   the tensors of some pieces
    rank-00000/shard-000000.jsonl         a line a piece: its place, its structure, what is no tensor
    predictions.json                      every shard with its digests; without it, there are no predictions here

No file is a pickle, and a reader compares what it reads with the index. So what a killed run leaves is never taken for
whole, and neither is a shard of another run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import safetensors.torch
import torch

from distributed.checkpoint.format.digests import digest_bytes
from distributed.checkpoint.format.skeleton import check_skeleton, unflatten
from distributed.checkpoint.format.tree import flatten
from distributed.checkpoint.storage.files import NotThere, Storage
from distributed.core.errors import DataError
from distributed.train.predictions.pieces import RowPiece

INDEX = "predictions.json"
FORMAT = 1
_SHARD_BYTES = 64 << 20  # of tensors that are held before a shard is written
_SHARD_ROWS = 1 << 16
_OF_RANK = re.compile(r"rank-\d+/shard-\d+\.(safetensors|jsonl)")


@dataclass(frozen=True)
class Shard:
    """What the index says of one."""

    name: str  # without its ending
    first: int  # the number of its first row
    rows: int
    tensors: str  # the digest of its safetensors
    lines: str  # and of its JSON lines


class ShardWriter:
    """Writes the pieces of one rank; holds as much of them as one shard."""

    def __init__(self, storage: Storage, rank: int, *, most_bytes: int = _SHARD_BYTES) -> None:
        self._storage, self._folder, self._most_bytes = storage, f"rank-{rank:05d}", most_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: set[int] = set()  # of the memory of these tensors
        self._lines: list[str] = []
        self._first, self._rows, self._bytes = 0, 0, 0
        self.shards: list[Shard] = []

    def add(self, piece: RowPiece) -> None:
        if not self._rows:
            self._first = piece.first
        tensors, skeleton = flatten(piece.rows, f"{len(self._lines)}")
        for name, tensor in tensors.items():
            self._tensors[name] = _own(tensor, self._places)
        self._lines.append(json.dumps({"first": piece.first, "size": piece.size, "rows": skeleton}))
        self._rows += piece.size
        self._bytes += sum(tensor.nbytes for tensor in tensors.values()) + len(self._lines[-1])
        if self._bytes >= self._most_bytes or self._rows >= _SHARD_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is held; also the last one, which is smaller."""
        if not self._rows:
            return
        name = f"{self._folder}/shard-{len(self.shards):06d}"
        tensors, lines = safetensors.torch.save(self._tensors), ("\n".join(self._lines) + "\n").encode()
        self._storage.write(f"{name}.safetensors", tensors)
        self._storage.write(f"{name}.jsonl", lines)
        self.shards.append(Shard(name, self._first, self._rows, digest_bytes(tensors), digest_bytes(lines)))
        self._tensors, self._lines, self._rows, self._bytes = {}, [], 0, 0
        self._places.clear()


def write_index(storage: Storage, shards: Sequence[Sequence[Shard]], *, is_numbered: bool, run: str) -> None:
    """The last file. `is_numbered`: whether pieces have their places among the rows of all ranks."""
    rows = sum(shard.rows for own in shards for shard in own)
    document = {
        "format": FORMAT,
        "rows": rows,
        "is_numbered": is_numbered,
        "run": run,
        "ranks": [[asdict(shard) for shard in own] for own in shards],
    }
    storage.write(INDEX, (json.dumps(document, indent=1) + "\n").encode())
    known = {f"{shard.name}.{ending}" for own in shards for shard in own for ending in ("safetensors", "jsonl")}
    for name in storage.list():  # of an attempt that did not come to its end
        if _OF_RANK.fullmatch(name) and name not in known:
            storage.delete(name)


@dataclass(frozen=True)
class PredictionIndex:
    """What the index of a folder says."""

    rows: int
    is_numbered: bool
    run: str
    ranks: tuple[tuple[Shard, ...], ...]


def read_index(storage: Storage) -> PredictionIndex | None:
    """None: there is none, so that nothing here is whole."""
    try:
        raw = storage.read(INDEX)
    except NotThere:
        return None
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']}, and this release reads {FORMAT}")
        ranks = tuple(tuple(Shard(**shard) for shard in own) for own in document["ranks"])
        return PredictionIndex(document["rows"], document["is_numbered"], document["run"], ranks)
    except (ValueError, TypeError, KeyError) as odd:
        raise _damaged(storage, INDEX, f"it is no index of predictions: {odd}") from odd


def read_shard(storage: Storage, shard: Shard) -> Iterator[RowPiece]:
    """Its pieces, once both of its files are known to be those of the index."""
    tensors = _checked(storage, f"{shard.name}.safetensors", shard.tensors)
    lines = _checked(storage, f"{shard.name}.jsonl", shard.lines)
    held = safetensors.torch.load(tensors)
    for line in lines.decode().splitlines():
        document = json.loads(line)
        check_skeleton(document["rows"], held)
        yield RowPiece(document["first"], document["size"], unflatten(document["rows"], held))


def _checked(storage: Storage, name: str, digest: str) -> bytes:
    try:
        found = storage.read(name)
    except NotThere as missing:
        raise _damaged(storage, name, "the file does not exist") from missing
    if digest_bytes(found) != digest:
        raise _damaged(storage, name, "its content is not what was written")
    return found


def _damaged(storage: Storage, name: str, why: str) -> DataError:
    return DataError(
        f"the predictions in {storage.root} are damaged: {storage.locate(name)}", why=why, do="predict them again"
    )


def _own(tensor: Any, taken: set[int]) -> torch.Tensor:
    """With memory of its own: of a part, the whole would be written, and what two tensors share is refused."""
    whole: torch.Tensor = tensor.detach().contiguous()
    if whole.untyped_storage().nbytes() != whole.nbytes or whole.data_ptr() in taken:
        whole = whole.clone()
    taken.add(whole.data_ptr())
    return whole
