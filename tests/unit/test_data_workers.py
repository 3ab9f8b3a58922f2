"""How many processes read data is measured, and changes no sample, no draw and no generator of the rank."""

from __future__ import annotations

import gc
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distributed import Trainer
from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan
from distributed.data.loading.loader import EvalLoader, TrainLoader
from distributed.data.loading.workers import (
    WorkerCount,
    candidates,
    choose,
    find_worker_count,
    keep,
    measure_rates,
    with_workers,
)
from distributed.data.source import Source


class Augmented(Dataset[Any]):
    """(sample, label) with noise of all three generators, and a count of the reads in this process."""

    def __init__(self, length: int = 40) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        noise = random.random() + float(np.random.rand()) + torch.rand(3)
        return noise + index % 2, index % 2


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter([(torch.zeros(3), 0)] * 8)


def read(workers: int, first_step: int = 0) -> list[Any]:
    source = Source(Augmented(), shuffle=True, num_workers=workers)
    loader = TrainLoader(source, BatchPlan(4, 2, 2), 1, seed=1, seeds_batches=True)
    return [[micro.batch[0].tolist() for micro in step.microbatches] for step in loader.epoch(2, first_step)]


def test_augmentation_does_not_depend_on_worker_count() -> None:
    alone = read(0)
    assert read(1) == read(2) == alone
    assert read(0, 1) == read(2, 1) == alone[1:], "also after a resume"


def test_evaluation_augmentation_does_not_depend_on_workers() -> None:
    def values(workers: int) -> list[Any]:
        source = Source(Augmented(), num_workers=workers)
        return [batch[0].tolist() for batch, _ in EvalLoader(source, 4, 1, 2, batch_seed=5)]

    assert values(0) == values(2)
    other = [batch[0].tolist() for batch, _ in EvalLoader(Source(Augmented()), 4, 1, 2, batch_seed=6)]
    assert values(0) != other


def test_reading_without_workers_leaves_generators_unchanged() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    read(0)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


@pytest.mark.parametrize(
    ("rates", "tried", "chosen"),
    [
        ({0: 240, 1: 230, 2: 450, 4: 812, 8: 830}, [0, 1, 2, 4, 8], 4),  # 8 is within 5 %
        ({0: 240, 1: 230, 2: 235, 4: 999, 8: 999}, [0, 1, 2], 0),  # two bring nothing more than one
        ({0: 100, 1: 300, 2: 310, 4: 999, 8: 999}, [0, 1, 2], 1),
        ({0: 9000, 1: 300, 2: 500, 4: 520, 8: 999}, [0, 1, 2, 4], 0),  # to send a batch costs more than to make it
    ],
)
def test_fewest_workers_within_5_percent_of_the_best_are_chosen(
    rates: dict[int, float], tried: list[int], chosen: int
) -> None:
    found = measure_rates(rates.__getitem__, candidates(8))
    assert list(found) == tried
    assert choose(found, overlaps=False) == chosen


def test_candidate_worker_counts_end_at_the_cores_of_a_rank() -> None:
    assert candidates(1) == [0, 1]
    assert candidates(2) == [0, 1, 2]
    assert candidates(12) == [0, 1, 2, 4, 8, 12]


def test_measuring_workers_leaves_dataset_and_generators_alone(tmp_path: Path) -> None:
    data, kept = Augmented(), tmp_path / "workers" / "rank-0.json"
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    source = Source(data, num_workers=1, timeout=30)
    worker_count = find_worker_count(source, BatchPlan(4), 0, cores=2, overlaps=False, kept=kept, seconds=0.05)
    assert data.reads == 0
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert worker_count.workers in worker_count.rates
    assert set(worker_count.rates) == {0, 1, 2}
    assert all(rate > 0 for rate in worker_count.rates.values())
    assert not torch.multiprocessing.active_children()
    keep(WorkerCount(7, {0: 1.0, 7: 9.0}), kept)
    again = find_worker_count(Source(data), BatchPlan(4), 0, cores=2, overlaps=False, kept=kept, seconds=0.05)
    assert again == WorkerCount(7, {0: 1.0, 7: 9.0}), "a rank that was restarted does not measure again"


class Shuffled:
    """A sampler that goes on drawing from a generator of its own, whatever the seed of the epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.rng = dataset, np.random.default_rng(5)

    def __iter__(self):
        return iter(self.rng.permutation(len(self.dataset)).tolist())

    def __len__(self) -> int:
        return len(self.dataset)


def test_measuring_workers_does_not_advance_a_user_sampler() -> None:
    data = Augmented()
    sampler, untouched = Shuffled(data), Shuffled(data)
    worker_count = find_worker_count(
        Source(data, sampler=sampler), BatchPlan(4), 0, cores=2, overlaps=False, seconds=0.05
    )
    assert worker_count.rates[0] > 0
    assert list(sampler) == list(untouched)


class Once(Shuffled):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.drawn = (n for n in range(len(dataset)))  # cannot be copied

    def __iter__(self):
        return self.drawn


def test_uncopyable_sampler_keeps_num_workers_with_a_reason() -> None:
    data = Augmented()
    source = Source(data, sampler=Once(data), num_workers=1)
    worker_count = find_worker_count(source, BatchPlan(4), 0, cores=2, overlaps=False, seconds=0.05)
    assert (worker_count.workers, worker_count.rates) == (1, {})
    assert "cannot be copied" in worker_count.decision.reason
    assert len(list(source.sampler)) == len(data)


def test_measuring_workers_does_not_copy_the_dataset() -> None:
    class Whole(Augmented):
        def __deepcopy__(self, memo: Any) -> Any:
            raise MemoryError

    data = Whole()
    worker_count = find_worker_count(
        Source(data, sampler=Shuffled(data)), BatchPlan(4), 0, cores=1, overlaps=False, seconds=0.05
    )
    assert worker_count.rates[0] > 0


def test_epoch_without_a_step_ends_the_measurement() -> None:
    source = Source(Augmented(3))
    worker_count = find_worker_count(source, BatchPlan(4, drop_last=True), 0, cores=1, overlaps=False, seconds=0.05)
    assert worker_count.workers == 0


def test_num_workers_setting_overrides_the_data_loaders() -> None:
    source = Source(Augmented(), num_workers=3, prefetch_factor=4, persistent_workers=True, timeout=30)
    two = TrainLoader(with_workers(source, 2), BatchPlan(4), 0, seed=1)
    none = TrainLoader(with_workers(source, 0), BatchPlan(4), 0, seed=1, seeds_batches=True)
    seen = [[step.microbatches[0].batch[0].tolist() for step in loader.epoch(0)] for loader in (two, none)]
    assert seen[0] == seen[1]
    assert len(torch.multiprocessing.active_children()) == 2, "of the first, which keeps its workers"


def fit(folder: Path, name: str, data: Any, **settings: Any) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    more = {"run_dir": str(folder / name), "epochs": 1, "progress": False} | settings
    trainer = Trainer(model, batch_size=8, **more)
    trainer.fit(data, Augmented())
    lines = (folder / name / "events.jsonl").read_text().splitlines()
    (started,) = [event for event in map(json.loads, lines) if event["event"] == "RunStarted"]
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist(), started


def test_measured_worker_count_changes_no_byte_and_is_reported(tmp_path: Path) -> None:
    data = DataLoader(Augmented(), batch_size=8, shuffle=True)
    alone, _ = fit(tmp_path, "none", data, num_workers=0)
    chosen, started = fit(tmp_path, "auto", data, num_workers="auto")
    two, _ = fit(tmp_path, "two", data, num_workers=2)
    assert alone == chosen == two
    (told,) = [line for line in started["decisions"] if "batches/s" in line]
    measured = json.loads((tmp_path / "auto" / "workers" / "rank-0.json").read_text())
    assert told.startswith(f"{measured['workers']} worker")
    assert "[num_workers]" in told


def test_stream_keeps_the_data_loaders_num_workers_with_reason(tmp_path: Path) -> None:
    _, started = fit(tmp_path, "stream", DataLoader(Stream(), batch_size=8), num_workers="auto")
    assert any("num_workers=0, the data loader's" in line for line in started["decisions"])


def test_num_workers_over_ray_data_are_refused() -> None:
    from distributed.engines.ray.data import RayRows

    with pytest.raises(DataError, match="num_workers=2"):
        with_workers(Source(RayRows.__new__(RayRows)), 2)


class Handle:
    """Garbage that must not be freed in another process, as what is a GPU's."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Augmented):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        gc.collect()
        return super().__getitem__(index)


def test_workers_do_not_run_finalizers_of_their_parent(tmp_path: Path) -> None:
    source = Source(Collecting(8), shuffle=True, num_workers=1)
    loader = TrainLoader(source, BatchPlan(4, 1, 1), 0, seed=1)
    gc.disable()  # until then it is there
    try:
        Handle(tmp_path / "freed")
        assert len(list(loader.epoch(0))) == 2
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "freed").read_text().split() == [str(os.getpid())]
