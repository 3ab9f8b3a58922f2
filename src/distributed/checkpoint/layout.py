"""Layout: which bytes of which tensor lie in which chunk, and which rank writes it.

It follows from the names, types and shapes alone. So any number of ranks makes the same chunks, and a tensor that has
not changed lies in chunks that are stored already. Of a tensor that the ranks hold in parts, each rank's boxes are cut
as tensors of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from distributed.core.errors import CheckpointError
from distributed.runtime.portions import Portion

CHUNK_BYTES = 4 * 2**20
PACK_BYTES = 2**20  # smaller tensors share chunks of up to this
PACK_BELOW = 2**18

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stretch:
    """A run of one tensor's bytes, in row-major order."""

    tensor: str
    start: int
    length: int
    offset: int  # in its chunk


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk to write."""

    stretches: tuple[Stretch, ...]
    length: int


def plan_chunks(tensors: Mapping[str, torch.Tensor]) -> list[ChunkPlan]:
    """Large tensors are cut every 4 MiB; small ones of the same component share a chunk.

    >>> plan = plan_chunks({"model/w": torch.zeros(2**21), "model/b": torch.zeros(3), "model/c": torch.zeros(5)})
    >>> [(chunk.length, len(chunk.stretches)) for chunk in plan]
    [(4194304, 1), (4194304, 1), (32, 2)]
    """
    large: list[ChunkPlan] = []
    packs: dict[str, list[Stretch]] = {}
    full: list[ChunkPlan] = []
    for name, tensor in tensors.items():
        size = byte_size(name, tensor)
        if size >= PACK_BELOW:
            cuts = range(0, size, CHUNK_BYTES)
            lengths = [min(CHUNK_BYTES, size - start) for start in cuts]
            large += [ChunkPlan((Stretch(name, start, n, 0),), n) for start, n in zip(cuts, lengths, strict=True)]
        elif size:
            pack = packs.setdefault(name.split("/", 1)[0], [])
            used = _end(pack)
            if used + size > PACK_BYTES:
                full.append(ChunkPlan(tuple(pack), used))
                pack.clear()
                used = 0
            pack.append(Stretch(name, 0, size, used))
    return large + full + [ChunkPlan(tuple(pack), _end(pack)) for pack in packs.values() if pack]


def share(plan: list[ChunkPlan], rank: int, world_size: int) -> list[ChunkPlan]:
    """What one rank writes: a run of the chunks with about its share of the bytes; every chunk belongs to one rank.

    >>> plan = plan_chunks({"w": torch.zeros(2**22)})
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


def byte_size(name: str, tensor: torch.Tensor) -> int:
    """How many bytes a tensor takes in a checkpoint; raises for one that a checkpoint cannot hold."""
    check_dtype(name, tensor)
    if tensor.layout != torch.strided or tensor.is_meta or hasattr(tensor, "to_local"):
        raise _not_storable(name, f"{type(tensor).__name__}: {tensor.layout}, on {tensor.device}")
    return tensor.numel() * tensor.element_size()


def check_dtype(name: str, tensor: torch.Tensor | Portion) -> None:
    """Raises for a type that a checkpoint cannot hold."""
    if tensor.dtype not in _NAMES:
        raise _not_storable(name, f"{type(tensor).__name__}: {str(tensor.dtype).removeprefix('torch.')}")


def dtype_name(tensor: torch.Tensor | Portion) -> str:
    return _NAMES[tensor.dtype]


def _not_storable(name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"the tensor {name!r} ({kind}) cannot be stored",
        why=f"a checkpoint holds dense tensors of the types {', '.join(DTYPES)}",
        do="let state_dict() return it in such a form",
    )


def _end(pack: list[Stretch]) -> int:
    """Where the next tensor begins in a pack."""
    return pack[-1].offset + pack[-1].length if pack else 0
