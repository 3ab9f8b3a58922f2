"""Rows: a dataset that is tensors in memory, of which a batch is gathered by index, without Python for each sample.

On a GPU the tensors are moved there once, and of each epoch only the order of its samples. A batch is then an index
and are gathered on the device when they are moved there, in a captured step too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from distributed.core.batch_plan import BatchPlan
from distributed.core.errors import DataError
from distributed.core.plan import Decision
from distributed.data.drawn import Share, make_here
from distributed.data.loading.loader import EvalLoader, Order, TrainLoader
from distributed.data.order import permutation
from distributed.data.shares import EpochSplit
from distributed.data.source import Source

_PART_OF_FREE = 10  # of the device's free memory, what rows may take by themselves: the tenth part
_CHUNK_BYTES = 64 << 20  # that are gathered on the host at once, on their way to the device

_SETTING = "data_on_device"

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True, eq=False)
class RowBatch:
    """A batch that is gathered where its rows are, when it is moved there. Waits for nothing."""

    rows: Tensors
    index: torch.Tensor  # int64, beside the rows; a part of the epoch's order

    def to(self, device: torch.device | str) -> list[torch.Tensor]:
        return [row.index_select(0, self.index).to(device, non_blocking=True) for row in self.rows]


@dataclass(frozen=True)
class Placing:
    """Whether rows went to the device, and the bytes by which that was decided."""

    on_device: str  # of the plan: "auto" or "on"
    size: int
    free: int  # on the device
    state: int = 0  # of `free`, what the optimizer is still to take

    @property
    def is_taken(self) -> bool:
        """
        >>> Placing("auto", 10, 100).is_taken, Placing("auto", 10, 100, state=1).is_taken
        (True, False)
        >>> Placing("on", 99, 100).is_taken
        True
        """
        if self.on_device == "on":
            return self.size <= self.free
        return self.size * _PART_OF_FREE <= self.free - self.state

    def decision(self, whose: str) -> Decision:
        sizes = f"{say_bytes(self.size)} of {say_bytes(self.free)} free"
        if self.is_taken:
            return Decision(f"{whose} data on the device", f"{sizes}, so that batches are gathered there", _SETTING)
        part = "" if self.on_device == "on" else f", of which it may take a tenth{self._less()}"
        return Decision(f"{whose} data on the host", sizes + part, _SETTING)

    def _less(self) -> str:
        return f" of what the optimizer's state leaves, {say_bytes(self.state)} less" if self.state else ""


@dataclass(frozen=True)
class Rows:
    """The tensors of a dataset, and where its samples are among their rows."""

    tensors: Tensors
    positions: torch.Tensor | None  # None: sample n is row n
    device: torch.device  # of the run; the rows may have stayed on the host
    samples: int
    placing: Placing | None = None  # None: there was nothing to decide

    @staticmethod
    def of(source: Source, device: torch.device, on_device: str = "auto", state_bytes: int = 0) -> Rows | None:
        """Of a TensorDataset, or a Subset of one, whose batches default_collate makes; None for anything else.

        `on_device`, as in SpeedPlan: "auto", "on" or "off". `state_bytes`: what the optimizer will still take there.
        """
        if source.collate_fn is not default_collate or (source.num_workers and source.worker_init_fn is not None):
            return None
        found = _unwrap(source.dataset)
        if found is None or not all(_is_plain(tensor) and _gathers_alike(tensor) for tensor in found[0]):
            return None
        tensors, positions = found
        samples = len(tensors[0]) if positions is None else len(positions)
        places = {tensor.device for tensor in tensors}
        if places != {torch.device("cpu")} and places != {device}:
            return None
        placing = None
        if places != {device} and device.type == "cuda" and on_device != "off":
            placing = Placing(on_device, _size(tensors, samples), torch.cuda.mem_get_info(device)[0], state_bytes)
        if placing is not None and placing.is_taken:
            tensors, positions = tuple(_moved(tensor, positions, device) for tensor in tensors), None
            if not all(_gathers_alike(tensor) for tensor in tensors):  # there, too
                return None
        positions = None if positions is None else positions.to(tensors[0].device)
        return Rows(tensors, positions, device, samples, placing)

    @property
    def is_on_device(self) -> bool:
        """Whether a batch is where it is used."""
        return self.tensors[0].device == self.device

    def locate(self, order: Order) -> torch.Tensor:
        """The rows of samples, as an index beside them: sent once for a whole epoch."""
        index = torch.arange(len(order)) if isinstance(order, range) else _checked(torch.as_tensor(order), self.samples)
        if self.tensors[0].device.type == "cuda":
            index = index.pin_memory().to(self.tensors[0].device, non_blocking=True)
        return index if self.positions is None else self.positions.index_select(0, index)

    def reader(self) -> Callable[[torch.Tensor], Any]:
        """What makes a batch of a part of such an index."""
        tensors = self.tensors
        if tensors[0].is_cuda:
            return lambda index: RowBatch(tensors, index)
        if self.device.type == "cuda":
            return lambda index: [_gather_pinned(tensor, index) for tensor in tensors]
        return lambda index: [tensor.index_select(0, index) for tensor in tensors]


class RowLoader(TrainLoader):
    """A TrainLoader over rows: no worker processes, and nothing is drawn while it reads."""

    def __init__(
        self, source: Source, rows: Rows, batch: BatchPlan, rank: int, *, seed: int, share: Share = make_here
    ) -> None:
        self._begin(source, batch, rank, seed, share)
        self._rows = rows

    def _make_order(self, epoch: int) -> torch.Tensor:
        source, samples = self._source, self._rows.samples
        if self._drawn is not None:
            return self._drawn.order(epoch)
        if source.shuffle:
            return torch.from_numpy(permutation(samples, self._seed, epoch))
        return torch.arange(samples)

    def _read(self, order: Order, cut: EpochSplit, epoch: int, first_step: int) -> Iterator[Any]:
        return _read_spans(self._rows, order, cut.spans(first_step))


class RowEvalLoader(EvalLoader):
    """An EvalLoader over rows."""

    def __init__(
        self,
        source: Source,
        rows: Rows,
        batch_size: int,
        rank: int,
        ranks: int,
        *,
        lockstep: bool,
        share: Share = make_here,
        most: int | None = None,
    ) -> None:
        super().__init__(source, batch_size, rank, ranks, lockstep=lockstep, share=share, most=most)
        self._rows = rows

    def _read(self, order: Order, spans: list[tuple[int, int]]) -> Iterator[Any]:
        return _read_spans(self._rows, order, spans)


def _read_spans(rows: Rows, order: Order, spans: Iterable[tuple[int, int]]) -> Iterator[Any]:
    index, read = rows.locate(order), rows.reader()
    for start, stop in spans:
        yield read(index[start:stop])


def _unwrap(dataset: Any) -> tuple[Tensors, torch.Tensor | None] | None:
    """The tensors under a dataset, and which of their rows its samples are. A class of the user's own may do anything
    in its `__getitem__`, so only torch's are taken."""
    positions: torch.Tensor | None = None
    while type(dataset) is Subset:
        own = np.asarray(dataset.indices)
        inner = len(dataset.dataset)  # type: ignore[arg-type]
        if own.ndim != 1 or own.dtype.kind != "i" or not len(own) or own.min() < -inner or own.max() >= inner:
            return None
        here = torch.from_numpy(np.where(own < 0, own + inner, own).astype(np.int64))
        positions = here if positions is None else here.index_select(0, positions)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not dataset.tensors or not len(dataset.tensors[0]):
        return None
    return dataset.tensors, positions


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return type(tensor) is torch.Tensor and is_dense and not tensor.requires_grad and not tensor.is_conj()


def _gathers_alike(tensor: torch.Tensor) -> bool:
    """Whether a batch of it has the layout that default_collate gives it; some kinds cannot be gathered at all."""
    try:
        taken = tensor.index_select(0, torch.tensor([0, 0], device=tensor.device))
    except RuntimeError:
        return False
    return taken.stride() == torch.stack([tensor[0], tensor[0]]).stride()


def _size(tensors: Tensors, samples: int) -> int:
    return sum(tensor[0].numel() * tensor.element_size() * samples for tensor in tensors)


def say_bytes(size: int) -> str:
    """
    >>> say_bytes(132 << 30), say_bytes(300 << 20), say_bytes(5 << 20)
    ('132.0 GiB', '0.3 GiB', '5.0 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 100 << 20 else f"{size / 2**20:.1f} MiB"


def _moved(tensor: torch.Tensor, positions: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The rows on the device, contiguous; of a Subset, those alone, and in its order."""
    samples = len(tensor) if positions is None else len(positions)
    held = torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
    if positions is None:
        return held.copy_(tensor)
    at_once = max(1, _CHUNK_BYTES // max(1, tensor[0].numel() * tensor.element_size()))
    for into, some in zip(held.split(at_once), positions.split(at_once), strict=True):
        into.copy_(tensor.index_select(0, some))
    return held


def _gather_pinned(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """In pinned memory, from which the device copies asynchronously; torch keeps it until that is done."""
    into = torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, index, out=into)


def _checked(order: torch.Tensor, samples: int) -> torch.Tensor:
    """A user's sampler may count from the end, as in a list. On a GPU, an index that is out of range would end the
    process."""
    if not len(order):
        return order
    least, most = (int(value) for value in torch.aminmax(order))
    if least < -samples or most >= samples:
        raise DataError(
            f"the sampler draws sample {most if most >= samples else least}, and the dataset has {samples}",
            why="samples are numbered from 0",
            do="draw from range(len(dataset))",
        )
    return torch.where(order < 0, order + samples, order) if least < 0 else order
