"""How a user's DataLoader picks samples: read by the exact class of what does it, so that no order of its own is lost.

A class that is derived from one of torch's may draw anything, so it is drawn from; what could be neither drawn nor cut
is refused by its name.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from distributed.core.errors import DataError
from distributed.data.drawn import OwnSampler, SeededOrder
from distributed.data.length_buckets import LengthBucketSampler, Lengths, SampleLength

_ITERATION = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")  # by which a DataLoader makes batches


@dataclass(frozen=True)
class Sampling:
    """What a DataLoader says of its batches."""

    batch_size: int | None
    drop_last: bool
    shuffle: bool = False
    sampler: OwnSampler | None = None
    note: str = ""
    length_of: SampleLength | None = None
    lengths: Lengths | None = None  # given with it


def check_loader(loader: DataLoader[Any], role: str) -> None:
    """Refuse a DataLoader whose batches are not those that its dataset and sampler say, or cannot be cut."""
    own = [name for name in _ITERATION if getattr(type(loader), name) is not getattr(DataLoader, name)]
    if own:
        raise DataError(
            f"{role} is a {type(loader).__name__}, which makes its batches in a {own[0]} of its own",
            why=f"the ranks read its dataset themselves, so that its {own[0]} would never be called",
            do=f"pass {role}=DataLoader(dataset, batch_size=…); a run keeps its position in the data itself",
        )
    if loader.batch_size is not None:
        return
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        raise DataError(
            f"{role} has a batch sampler of its own ({type(batches).__name__}), whose batches cannot be split over "
            "the ranks",
            why="the samples of each step are sharded over the ranks, and a batch sampler yields whole batches",
            do="pass its sample order as DataLoader(dataset, batch_size=…, sampler=…)",
        )
    if batches is None and not isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"{role} has batch_size=None, so its batches cannot be split over the ranks",
            why="batch_size=None turns automatic batching off, and one sample cannot be sharded",
            do="pass DataLoader(dataset, batch_size=…)",
        )
    if batches is None:
        raise DataError(
            f"{role} is a stream with batch_size=None, so its batches cannot be split over the ranks",
            why="the stream yields whole batches, and only samples can be sharded over the ranks",
            do="let the dataset yield samples and pass DataLoader(dataset, batch_size=…)",
        )


def read_sampling(loader: DataLoader[Any], role: str) -> Sampling:
    """Of a DataLoader that `check_loader` has passed."""
    sampler: Any = loader.sampler
    found = Sampling(loader.batch_size, loader.drop_last)
    if loader.batch_size is None:
        batches: Any = loader.batch_sampler
        found, sampler = Sampling(batches.batch_size, batches.drop_last), batches.sampler
    if not isinstance(loader.dataset, IterableDataset):
        found = _read_sampler(found, sampler, loader, role)
    notes = [found.note]
    if not getattr(loader, "in_order", True):
        notes.append("in_order=False is not needed: batches come in their order, so that a run can be resumed")
    if loader.generator is not None and loader.generator is not getattr(sampler, "generator", None):
        notes.append("the DataLoader's generator is not used: its workers draw under seeds of the run's `seed`")
    return replace(found, note="; ".join(note for note in notes if note))


def _read_sampler(found: Sampling, sampler: Any, loader: DataLoader[Any], role: str) -> Sampling:
    kind, dataset = type(sampler), loader.dataset
    if kind is LengthBucketSampler and _length(sampler.dataset) == _length(dataset):
        return replace(found, shuffle=True, length_of=sampler.rule, lengths=sampler.lengths)
    if kind is DistributedSampler:
        return _read_distributed(found, sampler, dataset, role)
    if getattr(sampler, "num_replicas", 1) != 1 and hasattr(sampler, "rank"):
        raise DataError(
            f"{role} has the sampler {kind.__name__}, which draws one rank's share (num_replicas="
            f"{sampler.num_replicas})",
            why="each rank would take a shard of that shard, and most samples would be left out",
            do="pass a sampler that draws the whole epoch's order, the same for all ranks",
        )
    if kind is SequentialSampler and _length(sampler.data_source) == _length(dataset):
        return found
    if kind is RandomSampler and sampler.generator is None and _draws_each_once(sampler, dataset):
        return replace(found, shuffle=True)
    if not hasattr(sampler, "__len__"):
        raise DataError(
            f"{role} has the sampler {kind.__name__}, which has no length",
            why="the number of steps of an epoch is planned from the sampler's length",
            do="give it __len__, or pass its order as a list",
        )
    note = f"{kind.__name__} draws each epoch's order once, for all ranks"
    return replace(found, sampler=_own(sampler, loader), note=note)


def _own(sampler: Any, loader: DataLoader[Any]) -> OwnSampler:
    """With a generator of its own: of two loaders that share one, each draws as if it were alone."""
    generator = getattr(sampler, "generator", None)
    if not isinstance(generator, torch.Generator):
        return OwnSampler(sampler)
    is_shared = generator is loader.generator
    if type(sampler).__module__.startswith("torch.utils.data"):
        sampler = copy.copy(sampler)
        sampler.generator = generator.clone_state()
    seeds_once = loader.persistent_workers and loader.num_workers > 0
    return OwnSampler(sampler, sampler.generator if is_shared else None, seeds_once=seeds_once)


def _read_distributed(found: Sampling, sampler: DistributedSampler[Any], dataset: Any, role: str) -> Sampling:
    length = len(sampler.dataset)  # type: ignore[arg-type]
    if length != _length(dataset):
        raise DataError(
            f"{role} has a DistributedSampler of {length} samples, and its dataset has {_length(dataset)}",
            why="the DistributedSampler is replaced by shares of the whole dataset",
            do="make the sampler of the dataset that the DataLoader reads, or leave it out",
        )
    note = "the DistributedSampler is replaced: our shares repeat no sample and drop none"
    if sampler.shuffle and sampler.seed:
        order = OwnSampler(SeededOrder(length, sampler.seed))
        return replace(found, sampler=order, note=f"{note}; the order is that of its seed={sampler.seed}")
    return replace(found, shuffle=sampler.shuffle, note=note)


def _draws_each_once(sampler: RandomSampler, dataset: Any) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source) == _length(dataset)


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
