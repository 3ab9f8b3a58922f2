"""Rows: what is gathered by index from tensors is what a data loader makes of them sample by sample."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from distributed.core.env import WorkerEnv
from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan, Plan, SpeedPlan
from distributed.data.loading.loader import EvalLoader, TrainLoader
from distributed.data.loading.rows import Placing, RowBatch, RowEvalLoader, RowLoader, Rows
from distributed.data.loading.transfer import to_device
from distributed.data.loading.virtual_rank_loader import VirtualRankLoader
from distributed.data.source import Source, read_source
from distributed.runtime.session import Session
from distributed.train.loaders import open_evaluations, open_training, state_to_come

CPU = torch.device("cpu")
LENGTH = 37


def tensors(length: int = LENGTH) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, 3, 4, generator=generator)
    columns = torch.randn(length, 5, generator=generator)[:, 1:3]  # not contiguous
    kinds = [x, columns, x.to(torch.bfloat16), (x[..., 0] > 0), torch.arange(length), torch.arange(length).byte()]
    return TensorDataset(*kinds, torch.full((length,), float("nan")))


def subset() -> Subset[Any]:
    return Subset(tensors(80), [*range(3, 39), -1])


def nested() -> Subset[Any]:
    return Subset(Subset(tensors(80), range(79, 20, -1)), np.arange(40)[:LENGTH])


class Backwards:
    """A sampler of the user's own, which counts from the end too."""

    def __iter__(self):
        return iter([-1, *range(LENGTH - 2, -1, -1)])

    def __len__(self) -> int:
        return LENGTH


def rows_of(source: Source) -> Rows:
    rows = Rows.of(source, CPU)
    assert rows is not None
    return rows


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Type, layout and bytes."""
    assert isinstance(a, list)
    assert isinstance(b, list)
    pairs = list(zip(a, b, strict=True))
    alike = all(x.dtype == y.dtype and x.stride() == y.stride() and x.shape == y.shape for x, y in pairs)
    return alike and all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


@pytest.mark.parametrize("make", [tensors, subset, nested])
@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"sampler": Backwards()}], ids=["shuffled", "plain", "own"])
@pytest.mark.parametrize(
    "batch",
    [BatchPlan(8), BatchPlan(3, 4), BatchPlan(4, 2, 3), BatchPlan(2, 3, drop_last=True), BatchPlan(2, 3).for_ranks(7)],
)
def test_row_loader_steps_equal_a_data_loaders(
    make: Callable[[], Any], options: dict[str, Any], batch: BatchPlan
) -> None:
    source = read_source(DataLoader(make(), batch_size=batch.per_device, **options), "train_loader")
    rows = rows_of(source)
    for rank, epoch, first in itertools.product(range(batch.ranks), range(2), (0, 1, 4)):
        loader = RowLoader(source, rows, batch, rank, seed=3)
        sampled = TrainLoader(source, batch, rank, seed=3)
        assert loader.steps_per_epoch == sampled.steps_per_epoch
        steps = zip(loader.epoch(epoch, first), sampled.epoch(epoch, first), strict=True)
        for number, (step, expected) in enumerate(steps, first):
            assert step.samples == expected.samples
            assert [(m.weight, m.size) for m in step.microbatches] == [
                (m.weight, m.size) for m in expected.microbatches
            ]
            batches = zip(step.microbatches, expected.microbatches, strict=True)
            assert all(same(mine.batch, theirs.batch) for mine, theirs in batches)
            assert loader.indices == sampled.indices == loader.sample_indices(epoch, number)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"sampler": Backwards()}])
def test_row_evaluation_equals_a_data_loaders(lockstep: bool, options: dict[str, Any]) -> None:
    source = read_source(DataLoader(subset(), batch_size=4, **options), "val_loader")
    for ranks in (1, 3, 5):
        for rank in range(ranks):
            mine = list(RowEvalLoader(source, rows_of(source), 4, rank, ranks, lockstep=lockstep))
            theirs = list(EvalLoader(source, 4, rank, ranks, lockstep=lockstep))
            assert [size for _, size in mine] == [size for _, size in theirs]
            assert all(same(a, b) for (a, _), (b, _) in zip(mine, theirs, strict=True))


def test_row_loader_draws_no_random_numbers() -> None:
    source = Source(tensors(), shuffle=True)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    for _ in RowLoader(source, rows_of(source), BatchPlan(4), 0, seed=1).epoch(0):
        pass
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_row_loader_draws_a_sampler_as_a_data_loader_does() -> None:
    sampler = WeightedRandomSampler([1.0] * LENGTH, num_samples=50)
    source = read_source(DataLoader(tensors(), batch_size=8, sampler=sampler), "train_loader")
    loader, sampled = (
        RowLoader(source, rows_of(source), BatchPlan(8), 0, seed=1),
        TrainLoader(source, BatchPlan(8), 0, seed=1),
    )
    found = [(loader.indices, sampled.indices) for _ in zip(loader.epoch(1), sampled.epoch(1), strict=True)]
    assert len(found) == 7
    assert all(mine == theirs for mine, theirs in found)


def test_sampler_index_outside_the_dataset_is_refused() -> None:
    source = Source(tensors(), sampler=[0, LENGTH])
    with pytest.raises(DataError, match=f"draws sample {LENGTH}"):
        next(RowLoader(source, rows_of(source), BatchPlan(2), 0, seed=1).epoch(0))


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(t + torch.randn(()) for t in super().__getitem__(index))


class Pairs(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


def init(worker: int) -> None:
    pass


@pytest.mark.parametrize(
    "source",
    [
        Source(Pairs()),
        Source(Noisy(torch.zeros(4))),
        Source(Subset(Noisy(torch.zeros(4)), [0, 1])),
        Source(TensorDataset(torch.zeros(4)), collate_fn=list),
        Source(TensorDataset(torch.zeros(4)), num_workers=1, worker_init_fn=init),
        Source(TensorDataset(torch.zeros(4, requires_grad=True))),
        Source(TensorDataset(torch.eye(4).to_sparse())),
        Source(TensorDataset(torch.zeros(4, device="meta"))),
        Source(Subset(TensorDataset(torch.zeros(4)), [0, 7])),
        Source(TensorDataset(torch.zeros(0, 3))),
    ],
    ids=["own", "subclass", "under", "collate", "init", "grad", "sparse", "meta", "outside", "empty"],
)
def test_data_other_than_plain_tensors_is_not_read_as_rows(source: Source) -> None:
    assert Rows.of(source, CPU) is None


@pytest.mark.parametrize(
    "images",
    [torch.randn(6, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(4, 4, 6).permute(2, 1, 0)],
    ids=["channels last", "transposed"],
)
def test_row_batch_has_the_memory_layout_of_a_data_loaders(images: torch.Tensor) -> None:
    source = Source(TensorDataset(images))
    (step, *_) = RowLoader(source, rows_of(source), BatchPlan(3), 0, seed=0).epoch(0)
    (expected, *_) = TrainLoader(source, BatchPlan(3), 0, seed=0).epoch(0)
    assert same(step.microbatches[0].batch, expected.microbatches[0].batch)


def test_row_loader_starts_no_workers() -> None:
    source = Source(tensors(), shuffle=True, num_workers=3, persistent_workers=True)
    loader = RowLoader(source, rows_of(source), BatchPlan(4), 0, seed=1)
    assert sum(step.samples for step in loader.epoch(0)) == LENGTH
    assert not torch.multiprocessing.active_children()


def test_loader_kind_follows_data_and_plan() -> None:
    session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
    plan, bitwise = Plan("run", BatchPlan(4)), Plan("run", BatchPlan(4, leaves=4))
    rows, pairs = Source(tensors(), num_workers=2), Source(Pairs())
    kinds = [
        type(open_training(source, p, session).loader) for source, p in ((rows, plan), (pairs, plan), (rows, bitwise))
    ]
    assert kinds == [RowLoader, TrainLoader, VirtualRankLoader]
    evaluation = open_evaluations({"a": rows, "b": pairs}, plan, session, lockstep=False)
    assert {name: type(loader) for name, loader in evaluation.loaders.items()} == {"a": RowEvalLoader, "b": EvalLoader}
    assert open_evaluations({}, plan, session, lockstep=False).loaders == {}


def test_row_batch_is_gathered_when_moved_to_the_device() -> None:
    x = torch.arange(12).view(6, 2)
    order = torch.tensor([5, 0, 3, 1])
    batch = RowBatch((x, x[:, 0].contiguous()), order.narrow(0, 1, 2))
    moved = to_device(batch, CPU)
    assert [part.tolist() for part in moved] == [[[0, 1], [6, 7]], [0, 6]]
    batch.index = torch.tensor([5, 5])  # a step that was captured has a buffer of its own there
    assert to_device(batch, CPU)[1].tolist() == [10, 10]


GIB = 2**30


@pytest.mark.parametrize(
    ("placing", "is_taken", "said"),
    [
        (Placing("auto", GIB // 2, 132 * GIB), True, ["on the device", "0.5 GiB of 132.0 GiB"]),
        (Placing("auto", 14 * GIB, 132 * GIB), False, ["on the host", "14.0 GiB of 132.0 GiB", "a tenth"]),
        (Placing("auto", 10 * GIB, 132 * GIB, state=60 * GIB), False, ["on the host", "60.0 GiB"]),
        (Placing("on", 130 * GIB, 132 * GIB, state=60 * GIB), True, ["on the device"]),
        (Placing("on", 133 * GIB, 132 * GIB), False, ["on the host", "133.0 GiB of 132.0 GiB"]),
    ],
)
def test_rows_are_placed_on_device_when_memory_allows(placing: Placing, is_taken: bool, said: list[str]) -> None:
    assert placing.is_taken == is_taken
    told = placing.decision("training")
    assert told.override == "data_on_device"
    assert all(part in str(told) for part in said)


def test_placing_reserves_memory_for_future_optimizer_state() -> None:
    layer = torch.nn.Linear(3, 4)
    layer.bias.requires_grad_(False)
    optimizer = torch.optim.Adam(layer.parameters())
    assert state_to_come(optimizer, CPU) == 3 * 4 * 8
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert state_to_come(optimizer, CPU) == 0


def test_data_on_device_refuses_data_that_is_no_tensors() -> None:
    session = Session.open(WorkerEnv(), device="cpu", collectives="gloo", timeout_s=60)
    plan = Plan("run", BatchPlan(4), speed=SpeedPlan(data_on_device="on"))
    with pytest.raises(DataError, match="data_on_device=True"):
        open_training(Source(Pairs()), plan, session)
    assert open_training(Source(tensors()), plan, session).decisions == [], "it is there already"
