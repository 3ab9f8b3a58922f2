"""Gathering: the boxes that this rank needs of a stored tensor, from the boxes in which it was stored.

A tensor that is wanted whole and stored whole is one run of bytes, whose shape does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distributed.checkpoint.format.boxes import Target, box_shape, fits, scatter, touches
from distributed.checkpoint.format.manifest import Ref, TensorEntry
from distributed.checkpoint.format.parsing import Damaged
from distributed.core.errors import CheckpointError
from distributed.runtime.tensor_shard import Box, box_size, overlap, whole_box

Boxes = Callable[[str, tuple[int, ...]], tuple[Box, ...] | None]  # by name and whole shape; None: all of it


class Memory(Protocol):
    """What a stored tensor becomes in memory: torch's, or another library's."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, np.ndarray[Any, Any]]:
        """A tensor whose elements are to come, and its bytes, of one dimension, to write them to."""

    def shard(self, shape: tuple[int, ...], dtype: str, pieces: tuple[tuple[Box, Any], ...]) -> Any:
        """These boxes of a tensor of that whole shape."""


@dataclass(frozen=True)
class ChunkRun:
    """A run of a piece's bytes in a chunk, some of which are wanted."""

    ref: Ref
    outer: Box  # the piece's
    start: int  # the place of its first element in the piece


class Gathering:
    """What is wanted of one tensor. `runs` says which chunks are needed, before any memory is taken for it."""

    def __init__(self, name: str, entry: TensorEntry, boxes: tuple[Box, ...] | None, memory: Memory) -> None:
        self._name, self._entry, self._wanted, self._memory = name, entry, boxes, memory
        is_flat = boxes is None and all(piece.ranges is None for piece in entry.pieces)
        self._itemsize = 1 if is_flat else entry.item_bytes
        self._shape = (entry.nbytes,) if is_flat else entry.shape
        self._boxes = (whole_box(self._shape),) if boxes is None else boxes
        self._targets: list[Target] = []
        self._tensors: list[Any] = []
        for box in self._boxes:
            if not fits(box, self._shape):
                raise CheckpointError(
                    f"{name} is {list(entry.shape)} in the checkpoint, and has no part {list(box)}",
                    why="the model that it is loaded into has another shape, or more dimensions than can be sharded",
                    do="pass the model that was saved, or another checkpoint_dir",
                )
        self.runs = tuple(self._find_runs())

    @property
    def nbytes(self) -> int:
        """Of the memory that will be taken."""
        return sum(map(box_size, self._boxes)) * self._itemsize

    def allocate(self) -> None:
        shapes = [self._entry.shape] if self._wanted is None else [box_shape(box) for box in self._boxes]
        made = [self._memory.empty(shape, self._entry.dtype) for shape in shapes]
        self._tensors = [tensor for tensor, _ in made]
        self._targets = [Target.of(box, flat, self._itemsize) for box, (_, flat) in zip(self._boxes, made, strict=True)]

    def take(self, run: ChunkRun, chunk: Any) -> None:
        """Copy what is wanted of one of the runs out of its chunk."""
        data = np.frombuffer(chunk, np.uint8, run.ref.length, run.ref.offset)
        scatter(data, run.outer, run.start, self._targets)

    @property
    def result(self) -> Any:
        if self._wanted is None:
            return self._tensors[0]
        pieces = tuple(zip(self._wanted, self._tensors, strict=True))
        return self._memory.shard(self._entry.shape, self._entry.dtype, pieces)

    def _find_runs(self) -> Iterator[ChunkRun]:
        for piece in self._entry.pieces:
            outer = whole_box(self._shape) if piece.ranges is None else piece.ranges
            common = [overlap(outer, box) for box in self._boxes]
            near = [box for box, part in zip(self._boxes, common, strict=True) if part is not None]
            if not near:
                continue
            start, is_all = 0, outer in common
            for ref in piece.refs:
                if ref.length % self._itemsize:
                    raise Damaged(
                        f"an element of {self._name} lies in two chunks",
                        why=f"{ref.length} bytes of it are in the chunk {ref.chunk[:12]}",
                        do="use an older checkpoint",
                    )
                stop = start + ref.length // self._itemsize
                if is_all or touches(outer, start, stop, near):
                    yield ChunkRun(ref, outer, start)
                start = stop
