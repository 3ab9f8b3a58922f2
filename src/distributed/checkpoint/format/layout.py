"""Layout: which bytes of which tensor lie in which chunk, and which rank writes it.

It follows from the names, types and shapes alone. So any number of ranks makes the same chunks, and a tensor that has
not changed lies in chunks that are stored already. Of a tensor that the ranks hold in parts, each rank's boxes are cut
as tensors of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributed.core.errors import CheckpointError

CHUNK_BYTES = 4 * 2**20
PACK_BYTES = 2**20  # smaller tensors share chunks of up to this
PACK_BELOW = 2**18

# The types that a checkpoint can hold, by their names in torch, which are those of numpy too; bytes of an element.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}


@dataclass(frozen=True)
class ByteRange:
    """A run of one tensor's bytes, in row-major order."""

    tensor: str
    start: int
    length: int
    offset: int  # in its chunk


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk to write."""

    ranges: tuple[ByteRange, ...]
    length: int


def plan_chunks(sizes: Mapping[str, int]) -> list[ChunkPlan]:
    """From the tensors' sizes in bytes: large ones are cut every 4 MiB; small ones of one component share a chunk.

    >>> plan = plan_chunks({"model/w": 2**23, "model/b": 12, "model/c": 20})
    >>> [(chunk.length, len(chunk.ranges)) for chunk in plan]
    [(4194304, 1), (4194304, 1), (32, 2)]
    """
    large: list[ChunkPlan] = []
    packs: dict[str, list[ByteRange]] = {}
    full: list[ChunkPlan] = []
    for name, size in sizes.items():
        if size >= PACK_BELOW:
            cuts = range(0, size, CHUNK_BYTES)
            lengths = [min(CHUNK_BYTES, size - start) for start in cuts]
            large += [ChunkPlan((ByteRange(name, start, n, 0),), n) for start, n in zip(cuts, lengths, strict=True)]
        elif size:
            pack = packs.setdefault(name.split("/", 1)[0], [])
            used = _end(pack)
            if used + size > PACK_BYTES:
                full.append(ChunkPlan(tuple(pack), used))
                pack.clear()
                used = 0
            pack.append(ByteRange(name, 0, size, used))
    return large + full + [ChunkPlan(tuple(pack), _end(pack)) for pack in packs.values() if pack]


def share(plan: list[ChunkPlan], rank: int, world_size: int) -> list[ChunkPlan]:
    """What one rank writes: a run of the chunks with about its share of the bytes; every chunk belongs to one rank.

    >>> plan = plan_chunks({"w": 2**24})
    >>> [len(share(plan, rank, 3)) for rank in range(3)]
    [1, 2, 1]
    """
    total, passed, mine = sum(chunk.length for chunk in plan), 0, []
    for chunk in plan:
        middle = passed + chunk.length / 2
        if min(int(middle * world_size / total), world_size - 1) == rank:
            mine.append(chunk)
        passed += chunk.length
    return mine


def not_storable(name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"the tensor {name!r} ({kind}) cannot be stored",
        why=f"a checkpoint holds dense tensors of the types {', '.join(ITEM_BYTES)}",
        do="let state_dict() return it in such a form",
    )


def _end(pack: list[ByteRange]) -> int:
    """Where the next tensor begins in a pack."""
    return pack[-1].offset + pack[-1].length if pack else 0
