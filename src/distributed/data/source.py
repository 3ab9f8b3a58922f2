"""Source: what a user's DataLoader says, without its sampling, in a form that can be sent to the ranks."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from distributed.core.engines.engine import ENGINES
from distributed.core.errors import DataError
from distributed.core.registry import load_target
from distributed.data.drawn import OwnSampler
from distributed.data.length_buckets import Lengths, SampleLength
from distributed.data.loading.dali import DaliBatches, is_dali_iterator
from distributed.data.sampling import check_loader, read_sampling


@dataclass(frozen=True)
class Source:
    """A dataset, how to read it, and in which order: shuffled, in sequence, or as the user's own sampler draws."""

    dataset: Any
    batch_size: int | None = None
    shuffle: bool = False
    sampler: Iterable[int] | None = None  # wrapped as an OwnSampler
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    pin_memory: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    sampling: str = ""  # what is worth saying of how the loader's sampling was read
    length_of: SampleLength | None = None  # by which samples are put into batches with others of similar length
    lengths: Lengths | None = field(default=None, compare=False)  # of all samples, where they are known

    def __post_init__(self) -> None:
        if self.sampler is not None and not isinstance(self.sampler, OwnSampler):
            object.__setattr__(self, "sampler", OwnSampler(self.sampler))

    @property
    def own_sampler(self) -> OwnSampler | None:
        assert self.sampler is None or isinstance(self.sampler, OwnSampler)
        return self.sampler

    @property
    def is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def samples(self) -> int | None:
        """Samples an epoch; None for a stream."""
        if self.is_stream:
            return None
        return len(self.sampler) if self.sampler is not None else len(self.dataset)  # type: ignore[arg-type]

    def in_order(self) -> Source:
        """The same samples in the dataset's order, each once."""
        return replace(self, shuffle=False, sampler=None, sampling="", length_of=None, lengths=None)

    def bucketed(self, by: bool | str, role: str) -> Source:
        """The same in batches of samples of similar length; `by`: the entry of a sample that has it."""
        obstacles = {
            f"{role} is a stream": (self.is_stream, "its samples come in an order of their own"),
            f"{role} has a sampler of its own": (self.sampler is not None, "it says the order of the samples"),
            f"{role} is read in the dataset's order": (not self.shuffle, "buckets need an order that is drawn"),
        }
        for what, (is_there, why) in obstacles.items():
            if is_there:
                do = "pass DataLoader(dataset, batch_size=…, shuffle=True), or leave bucket_by_length out"
                raise DataError(f"bucket_by_length={by}, and {what}", why=why, do=do)
        return replace(self, length_of=SampleLength(by if isinstance(by, str) else ""))

    def loader_options(self, *, pin_memory: bool) -> dict[str, Any]:
        """The user's options for the DataLoader that a rank makes."""
        options: dict[str, Any] = {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory and pin_memory,
            "timeout": self.timeout if self.num_workers else 0,  # of what a worker is waited for
        }
        if self.num_workers:
            options |= {
                "worker_init_fn": WorkerStart(self.worker_init_fn),
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "multiprocessing_context": self.multiprocessing_context,
            }
        return options


@dataclass(frozen=True)
class WorkerStart:
    """What a data loader's worker does first. Ctrl-C in a terminal reaches it too, but it is the rank that decides."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # what is garbage here is the parent's to free: see ForkedLoader
        gc.enable()
        if self.then is not None:
            self.then(worker)


def read_source(data: object, role: str) -> Source:
    """The Source of a DataLoader, a Dataset, an engine's dataset or a DALI iterator; `role` names it in errors."""
    if isinstance(data, Source):
        return data
    if (dataset := _read_by_engine(data)) is not None:
        return Source(dataset)
    if isinstance(data, DaliBatches) or is_dali_iterator(data):
        ready = data if isinstance(data, DaliBatches) else DaliBatches(data)
        note = "DALI shards and orders its data itself; a run that is resumed passes over the batches that it has had"
        return Source(ready, batch_size=ready.batch_size, sampling=note)
    if isinstance(data, DataLoader):
        return _read_loader(data, role)
    is_listed = (
        hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes | Mapping)
    )
    if isinstance(data, Dataset) or is_listed:
        _refuse_columns(data, role)
        _check_dataset(data, role)
        return Source(data)
    why = "the samples are sharded over the ranks, which needs a torch DataLoader or Dataset"
    do = f"pass {role}=DataLoader(dataset, batch_size=…)"
    if hasattr(data, "__next__"):  # of a DataLoader, a zip, a generator function
        why = "an iterator can be read once, by one process, and has no samples that could be divided among ranks"
        do += "; a stream of samples is a torch IterableDataset whose __iter__ yields them"
    if isinstance(data, nn.Module | Optimizer):
        why = "fit takes the data; what is trained, and how, is given to the trainer before"
        do = "Trainer(model, optimizer=…).fit(train_loader, val_loader)"
    raise DataError(f"{role} is a {type(data).__name__}", why=why, do=do)


def _refuse_columns(data: object, role: str) -> None:
    """`(x, y)` and `[loader, loader]`, which would be read as two samples."""
    if isinstance(data, list | tuple) and any(isinstance(one, DataLoader | Dataset) for one in data):
        raise DataError(
            f"{role} is a {type(data).__name__} of {len(data)} data loaders or datasets",
            why="an epoch goes over one dataset; only an evaluation takes several loaders",
            do=f"pass {role}=DataLoader(ConcatDataset([…]), batch_size=…, shuffle=True)",
        )
    if not isinstance(data, tuple) or len(data) < 2 or hasattr(data, "_fields"):
        return
    shapes = [tuple(getattr(column, "shape", ())) for column in data]
    if all(shapes) and len({shape[0] for shape in shapes}) == 1 and len(set(shapes)) > 1:
        raise DataError(
            f"{role} is a tuple of {len(data)} arrays with {shapes[0][0]} rows each",
            why=f"a tuple is read as a dataset of {len(data)} samples, and not as inputs and targets",
            do=f"pass {role}=TensorDataset(inputs, targets) and batch_size=…",
        )


def _check_dataset(dataset: Any, role: str) -> None:
    """Refuse a dataset whose samples can neither be counted nor be read as a stream."""
    if isinstance(dataset, IterableDataset):
        return
    lacking = [name for name in ("__len__", "__getitem__") if _lacks(dataset, name)]
    if lacking:
        streams = "make it an IterableDataset" if hasattr(dataset, "__iter__") else f"define {' and '.join(lacking)}"
        raise DataError(
            f"{role} reads a {type(dataset).__name__}, which has no {' and no '.join(lacking)}",
            why="ranks take samples by their numbers, from 0 to len(dataset) - 1",
            do=streams,
        )


def _lacks(dataset: Any, name: str) -> bool:
    own = getattr(type(dataset), name, None)
    return own is None or own is getattr(Dataset, name, None)


def reader_of(dataset: object) -> str:
    """The library that reads a dataset in threads or processes of its own; "": none.

    >>> reader_of([1, 2])
    ''
    """
    return str(getattr(type(dataset), "read_by", ""))  # of the class: an object may answer to any name


def _read_by_engine(data: object) -> object:
    """The dataset that an engine makes of an object of the package that it needs; None: there is no such engine."""
    packages = {kind.__module__.partition(".")[0] for kind in type(data).__mro__}
    readers = (engine.reads for engine in ENGINES.entries.values() if engine.reads and engine.package in packages)
    return next((found for reads in readers if (found := load_target(reads)(data)) is not None), None)


def _read_loader(loader: DataLoader[Any], role: str) -> Source:
    if isinstance(loader.dataset, DaliBatches):
        raise DataError(
            f"{role} is a DataLoader around a DALI iterator",
            why="DALI makes the batches itself, and a DataLoader would make batches of them",
            do=f"pass {role}=the iterator",
        )
    check_loader(loader, role)
    if loader.num_workers and (reader := reader_of(loader.dataset)):
        raise DataError(
            f"{role} has num_workers={loader.num_workers} over a {reader} dataset",
            why=f"{reader} reads it in processes of its own, and a data loader worker cannot reach them",
            do="set num_workers=0",
        )
    sampling = read_sampling(loader, role)
    if sampling.sampler is None:
        _check_dataset(loader.dataset, role)
    return Source(
        loader.dataset,
        batch_size=sampling.batch_size,
        shuffle=sampling.shuffle,
        sampler=sampling.sampler,
        drop_last=sampling.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=_context_name(loader.multiprocessing_context),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        sampling=sampling.note,
        length_of=sampling.length_of,
        lengths=sampling.lengths,
    )


def _context_name(context: Any) -> str | None:
    return None if context is None else context.get_start_method()
