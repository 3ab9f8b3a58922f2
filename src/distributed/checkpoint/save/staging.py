"""Staging: host memory that a save copies into and the next save uses again; pinned where the state is on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distributed.checkpoint.format.layout import CHUNK_BYTES, ByteRange, ChunkPlan
from distributed.checkpoint.format.tensors import as_bytes
from distributed.checkpoint.format.tree_spec import TreeSpec
from distributed.checkpoint.save.outline import outline
from distributed.checkpoint.save.publishing import Bytes
from distributed.checkpoint.save.saver import StateTree

_SEGMENT_BYTES = 16 * CHUNK_BYTES  # a power of two: pinned memory is handed out in those
_ALIGNMENT = 4096
_MOST_THREADS = 8
_MOST_COPIED = _SEGMENT_BYTES  # of tensors that are not contiguous, at once


class HostBuffer:
    """Grows by segments and never shrinks, so that a save takes no new memory after the first."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._segments: list[torch.Tensor] = []
        self._segment, self._used = 0, 0

    @property
    def nbytes(self) -> int:
        return len(self._segments) * _SEGMENT_BYTES

    def reserve(self, lengths: Iterable[int]) -> None:
        """Take the memory for chunks of these lengths now, rather than in the first save."""
        self.clear()
        for length in lengths:
            self.place(length)
        if not self._pinned:
            for index, segment in enumerate(self._segments[: self._segment + 1]):
                used = self._used if index == self._segment else _SEGMENT_BYTES
                segment[:used].zero_()  # the pages are mapped when they are first written
        self.clear()

    def clear(self) -> None:
        self._segment, self._used = 0, 0

    def place(self, length: int) -> tuple[torch.Tensor, int]:
        """Room for one chunk, until the buffer is cleared: a segment, and where in it."""
        assert 0 < length <= CHUNK_BYTES
        if self._used + length > _SEGMENT_BYTES:
            self._segment, self._used = self._segment + 1, 0
        if self._segment == len(self._segments):
            self._segments.append(torch.empty(_SEGMENT_BYTES, dtype=torch.uint8, pin_memory=self._pinned))
        segment, at = self._segments[self._segment], self._used
        self._used += -(-length // _ALIGNMENT) * _ALIGNMENT
        return segment, at


def copy_chunks(
    plan: Iterable[ChunkPlan], tensors: Mapping[str, torch.Tensor], buffer: HostBuffer
) -> list[tuple[ChunkPlan, np.ndarray[Any, Any]]]:
    """A copy of the chunks' bytes, independent of later changes of the tensors."""
    copied: list[tuple[ChunkPlan, np.ndarray[Any, Any]]] = []
    flat: dict[str, torch.Tensor] = {}
    on_host: list[tuple[torch.Tensor, torch.Tensor]] = []
    devices: set[torch.device] = set()
    runs: list[_Run] = []
    made = 0
    for chunk in plan:
        segment, at = buffer.place(chunk.length)
        copied.append((chunk, segment[at : at + chunk.length].numpy()))
        for byte_range in chunk.ranges:
            if not (runs and runs[-1].extend(byte_range, segment, at + byte_range.offset)):
                runs.append(
                    _Run(byte_range.tensor, byte_range.start, byte_range.length, segment, at + byte_range.offset)
                )
    for run in runs:
        if run.tensor not in flat:
            if made > _MOST_COPIED:
                _copy_on_host(on_host)
                on_host, flat, made = [], {}, 0
            tensor = tensors[run.tensor].detach()
            flat[run.tensor] = as_bytes(tensor)
            made += 0 if tensor.is_contiguous() else tensor.nbytes
        source = flat[run.tensor][run.start : run.start + run.length]
        target = run.segment[run.at : run.at + run.length]
        if source.device.type == "cpu":
            on_host += zip(
                target.split(CHUNK_BYTES), source.split(CHUNK_BYTES), strict=True
            )  # small enough to split over threads
        else:
            target.copy_(source, non_blocking=True)
            devices.add(source.device)
    _copy_on_host(on_host)
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()
    return copied


@dataclass
class _Run:
    """Bytes of one tensor that lie together on both sides, so that one copy takes them all."""

    tensor: str
    start: int
    length: int
    segment: torch.Tensor
    at: int

    def extend(self, byte_range: ByteRange, segment: torch.Tensor, at: int) -> bool:
        follows = byte_range.tensor == self.tensor and byte_range.start == self.start + self.length
        if not follows or segment is not self.segment or at != self.at + self.length:
            return False
        self.length += byte_range.length
        return True


def _copy_on_host(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """With threads that take what is next: torch's own wait for each other, which is slow where cores are shared."""
    threads = min(torch.get_num_threads(), _MOST_THREADS)
    if threads == 1 or sum(target.numel() for target, _ in pairs) < CHUNK_BYTES:
        for target, source in pairs:
            np.copyto(target.numpy(), source.numpy())
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda pair: np.copyto(pair[0].numpy(), pair[1].numpy()), pairs))


class TensorStaging:
    """Tensors are copied into memory that the next save uses again."""

    def __init__(self, *, pinned: bool = False, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises where what was copied is not the state of the run. Pinned memory is for a state on a GPU."""
        self._check = check
        self.frameworks: Mapping[str, str] = {"torch": str(torch.__version__)}
        self._buffer = HostBuffer(pinned=pinned)
        self.reserve, self.clear = self._buffer.reserve, self._buffer.clear

    def outline(self, tree: StateTree, before: TreeSpec | None) -> tuple[TreeSpec, Mapping[str, Any]]:
        return outline(tree, before)

    def copy(self, plan: Iterable[ChunkPlan], leaves: Mapping[str, Any]) -> list[tuple[ChunkPlan, Bytes]]:
        copied = copy_chunks(plan, leaves, self._buffer)
        self._check()
        return copied
