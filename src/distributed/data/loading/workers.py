"""How many processes read the data: measured before the first step, by every rank for itself.

What a batch draws depends on its place in the epoch, not on the process that reads it (TrainLoader's `seeds_batches`),
so ranks may choose different numbers, and a restarted rank another one, without a change in any sample.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset

from distributed.core.batch_plan import BatchPlan
from distributed.core.errors import DataError
from distributed.core.plan import Decision
from distributed.data.loading.forks import ForkedLoader
from distributed.data.loading.loader import TrainLoader
from distributed.data.source import Source, reader_of
from distributed.data.virtual_ranks import ShareIndices, ShareReader, as_read

SECONDS = 1.0  # for which a number of workers is tried
_WORTH = 1.10  # more workers must bring so much, or no more are tried
_NEAR = 0.95  # of the best: as good as it
_MOST_KEYS = 256  # batches that a single reader is given, repeated if it is quick

Rates = dict[int, float]  # batches a second, by the number of workers


@dataclass(frozen=True)
class WorkerCount:
    """How many workers, and what was measured."""

    workers: int
    rates: Rates  # none: it was not to be chosen
    why: str = ""

    @property
    def decision(self) -> Decision:
        if not self.rates:
            return Decision(f"num_workers={self.workers}, the data loader's", self.why)
        measured = f"{self.rates[self.workers]:.0f} batches/s"
        others = [n for n in (0, max(self.rates)) if n != self.workers]
        more = [f"with {n}: {self.rates[n]:.0f}" for n in others if n in self.rates]
        name = f"{self.workers} worker{'s' * (self.workers != 1)} to read data"
        return Decision(name, ", ".join([measured, *more]), "num_workers")


def with_workers(source: Source, workers: int) -> Source:
    """The source read by that many processes, instead of its data loader's `num_workers`."""
    if workers and (reader := reader_of(source.dataset)):
        raise DataError(
            f"num_workers={workers} over data of {reader}",
            why=f"{reader} reads it in processes of its own, and a data loader worker cannot reach them",
            do="leave num_workers out",
        )
    if not workers:
        return replace(source, num_workers=0, prefetch_factor=None, persistent_workers=False)
    return replace(source, num_workers=workers)


def can_choose(source: Source) -> bool:
    """Whether any number of workers reads the same."""
    return not source.is_stream and not reader_of(source.dataset)


def fixed_worker_count(source: Source) -> WorkerCount:
    """Of what cannot be chosen."""
    if reader := reader_of(source.dataset):
        return WorkerCount(0, {}, f"{reader} reads the data on its own")
    return WorkerCount(source.num_workers, {}, "each worker of a stream reads a copy of it, unless it divides itself")


def find_worker_count(
    source: Source,
    batch: BatchPlan,
    rank: int,
    *,
    cores: int,
    overlaps: bool,
    pin_memory: bool = False,
    kept: Path | None = None,
    seconds: float = SECONDS,
) -> WorkerCount:
    """Measure; or take what this rank has measured before its run was interrupted, if `kept` has it."""
    try:
        source = _with_copied_sampler(source)
    except Exception as failed:  # noqa: BLE001 - a copy of the user's sampler runs the user's code
        return WorkerCount(
            source.num_workers, {}, f"measuring would draw from the sampler, which cannot be copied ({failed})"
        )
    if kept is not None and kept.exists():
        found = json.loads(kept.read_text())
        return WorkerCount(found["workers"], {int(n): rate for n, rate in found["rates"].items()})
    tries = candidates(cores)

    def rate_of(workers: int) -> float:
        first = tries.index(workers) / len(tries)  # others than before, which the system has now in memory
        if not workers:
            return _rate_alone(source, batch, rank, first, seconds)
        loader = TrainLoader(_tried(source, workers), batch, rank, seed=0, pin_memory=pin_memory)
        return _rate(loader.endless(first), workers, seconds)

    rates = measure_rates(rate_of, tries)
    return WorkerCount(choose(rates, overlaps=overlaps), rates)


def keep(worker_count: WorkerCount, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"workers": worker_count.workers, "rates": worker_count.rates}))


def candidates(cores: int) -> list[int]:
    """
    >>> candidates(6)
    [0, 1, 2, 4, 6]
    """
    doubled = itertools.takewhile(lambda n: n < cores, (2**n for n in itertools.count()))
    return [0, *doubled, max(1, cores)]


def measure_rates(rate_of: Callable[[int], float], tries: list[int]) -> Rates:
    """Until more workers are not worth it. One alone often brings nothing in itself, and says nothing of two."""
    rates: Rates = {}
    for workers in tries:
        rates[workers] = rate_of(workers)
        fewer = [rate for n, rate in rates.items() if 0 < n < workers]
        if fewer and rates[workers] < _WORTH * max(fewer):
            break
    return rates


def choose(rates: Rates, *, overlaps: bool) -> int:
    """The fewest that are as good as the best. Where a GPU computes meanwhile, that is at least one if any: the rank
    that reads by itself keeps it waiting.

    >>> choose({0: 240.0, 1: 235.0, 2: 460.0, 4: 470.0}, overlaps=False)
    2
    >>> choose({0: 240.0, 1: 235.0}, overlaps=False), choose({0: 240.0, 1: 235.0}, overlaps=True)
    (0, 1)
    """
    best = max(rates.values())
    near = sorted(n for n, rate in rates.items() if rate >= _NEAR * best)
    return next((n for n in near if n), 0) if overlaps else near[0]


def _with_copied_sampler(source: Source) -> Source:
    """With a sampler to measure with: one that continues from where it was, on ranks that have drawn from it more and
    less often, would give each an order of its own. It may have the dataset, which is not copied."""
    return replace(source, sampler=copy.deepcopy(source.sampler, {id(source.dataset): source.dataset}))


def _tried(source: Source, workers: int) -> Source:
    return replace(with_workers(source, workers), persistent_workers=False)


def _rate(batches: Iterator[Any], workers: int, seconds: float) -> float:
    """Of a loader whose workers have begun: each has had time for a first batch."""
    nothing = object()
    if any(next(batches, nothing) is nothing for _ in range(workers)):
        return 0.0
    begun, count = perf_counter(), 0
    while (spent := perf_counter() - begun) < seconds or not count:
        next(batches)
        count += 1
    return count / spent


def _rate_alone(source: Source, batch: BatchPlan, rank: int, first: float, seconds: float) -> float:
    """Of reading without workers, yet in a process of its own: a dataset that counts or draws on its own account must
    begin the run as it is."""
    keys = list(
        itertools.islice(
            TrainLoader(_tried(source, 0), batch, rank, seed=0, seeds_batches=True).keys(first), _MOST_KEYS
        )
    )
    if not keys:
        return 0.0
    reader = _Stopwatch(ShareReader(source.dataset, source.collate_fn), keys, seconds)
    options = replace(_tried(source, 1), timeout=0).loader_options(pin_memory=False) | {"generator": torch.Generator()}
    (rate,) = ForkedLoader(reader, batch_size=None, collate_fn=as_read, **options)
    return float(rate)


class _Stopwatch(Dataset[float]):
    """Its one sample is the rate at which it reads."""

    def __init__(self, reader: ShareReader, keys: list[ShareIndices], seconds: float) -> None:
        self._reader, self._keys, self._seconds = reader, keys, seconds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> float:
        self._reader[self._keys[0]]  # files are opened, caches filled
        begun, count = perf_counter(), 0
        for key in itertools.cycle(self._keys[1:] or self._keys):
            self._reader[key]
            count += 1
            spent = perf_counter() - begun
            if spent >= self._seconds:
                break
        return count / spent
