"""The lengths of all samples, measured once before the first step, by all ranks together, and kept for later worlds."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from distributed.core.atomic import make_private, write_private
from distributed.core.batch_plan import BatchPlan
from distributed.core.errors import DataError
from distributed.core.plan import Decision
from distributed.data.length_buckets import Lengths, SampleLength, bucketed_order, padding
from distributed.data.loading.forks import ForkedLoader
from distributed.data.order import permutation
from distributed.data.shares import share
from distributed.data.source import Source
from distributed.data.virtual_ranks import as_read

_ROUNDS = 20  # in which all ranks measure, so that none waits long for another
_CHUNK = 256  # samples that a reader measures at once
_SAY_EVERY_S = 5.0
_LOOKS = 1_000_000  # positions of an epoch from which its padding is estimated


class MeasuringRank(NamedTuple):
    """This rank among those that measure, and the sum over all of them."""

    rank: int
    world_size: int
    total: Callable[[torch.Tensor], torch.Tensor]


def measure_lengths(source: Source, ranks: MeasuringRank, tell: Callable[[str], None]) -> Lengths:
    """Every rank measures its share, in processes of its own: the dataset stays as it is. All get all of them."""
    assert source.length_of is not None
    samples = source.samples
    assert samples is not None
    found = np.zeros(samples, dtype=np.int32)
    start, stop = share(samples, ranks.world_size, ranks.rank)
    chunks = _measured(source, start, stop)
    said, at = monotonic(), start
    for round_ in range(_ROUNDS):
        until = start + (stop - start) * (round_ + 1) // _ROUNDS
        while at < until:
            part = next(chunks)
            found[at : at + len(part)] = part
            at += len(part)
        ranks.total(torch.tensor(at - start))  # a rank that is slower is waited for in short spans
        if monotonic() - said >= _SAY_EVERY_S:
            said = monotonic()
            tell(f"lengths of {samples:,} samples: {(round_ + 1) / _ROUNDS:.0%}")
    total: Lengths = ranks.total(torch.from_numpy(found)).numpy()
    return total


def bucket_decision(source: Source, batch: BatchPlan, seed: int) -> Decision:
    """What the buckets save in the first epoch, where each rank pads its micro-batches to their longest sample."""
    assert source.lengths is not None
    assert source.length_of is not None
    lengths, size = source.lengths, max(1, batch.micro_batch // batch.ranks)
    before, after = (
        padding(order[:_LOOKS], lengths, size)
        for order in (permutation(len(lengths), seed, 0), bucketed_order(lengths, batch.global_batch, seed, 0))
    )
    what = f"batches of samples of similar length ({lengths.min()} to {lengths.max()}, by {source.length_of.name})"
    return Decision(what, f"{after:.0%} of a padded batch is padding, shuffled alone {before:.0%}", "bucket_by_length")


def keep_lengths(lengths: Lengths, key: str, path: Path) -> None:
    """For later worlds of this run: measuring takes as long as reading the dataset."""
    make_private(path.parent)
    file = io.BytesIO()
    np.savez(file, lengths=lengths, key=np.array(key))
    write_private(path, file.getvalue())


def kept_lengths(key: str, path: Path) -> Lengths | None:
    """Those of the same dataset and rule."""
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        return file["lengths"] if str(file["key"]) == key else None


def _measured(source: Source, start: int, stop: int) -> Iterator[Lengths]:
    """Chunk by chunk, in order, by as many worker processes as the data loader has, or one."""
    assert source.length_of is not None
    spans = [(at, min(at + _CHUNK, stop)) for at in range(start, stop, _CHUNK)]
    if not spans:
        return
    plain = replace(source, num_workers=max(1, source.num_workers), persistent_workers=False, timeout=0)
    options = plain.loader_options(pin_memory=False) | {"generator": torch.Generator()}
    reader = _Lengths(source.dataset, source.length_of)
    for found in ForkedLoader(reader, batch_size=None, sampler=spans, collate_fn=as_read, **options):
        if isinstance(found, DataError):
            raise found
        yield found


class _Lengths(Dataset[Any]):
    """Reads lengths by spans of samples."""

    def __init__(self, dataset: Any, rule: SampleLength) -> None:
        self._dataset, self._rule = dataset, rule

    def __getitem__(self, span: tuple[int, int]) -> Lengths | DataError:
        try:
            found = [self._rule.measure(self._dataset, index) for index in range(*span)]
        except DataError as failed:  # raised where it is read, without the traceback of a worker
            return failed
        return np.array(found, dtype=np.int32)
