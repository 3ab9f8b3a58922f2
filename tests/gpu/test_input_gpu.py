"""Input on a real GPU: rows that are there already, copies beside the step, and the same batches whichever way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from distributed import Trainer
from distributed.core.errors import DataError
from distributed.core.plan import BatchPlan
from distributed.data.loading.loader import TrainLoader
from distributed.data.loading.prefetch import Prefetch
from distributed.data.loading.rows import RowBatch, RowLoader, Rows
from distributed.data.loading.transfer import to_device
from distributed.data.source import Source

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda", 0)
LENGTH = 300


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 32, generator=generator)
    images = torch.randn(LENGTH, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    return TensorDataset(x, images, x.to(torch.bfloat16), x[:, :1] > 0, torch.arange(LENGTH))


def rows_of(source: Source) -> Rows:
    rows = Rows.of(source, GPU)
    assert rows is not None
    return rows


def same(moved: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    assert isinstance(moved, list)
    pairs = list(zip(moved, expected, strict=True))
    assert all(a.is_cuda and a.dtype == b.dtype and a.stride() == b.stride() for a, b in pairs)
    return all(torch.equal(a.cpu(), b) for a, b in pairs)


@pytest.mark.parametrize("batch", [BatchPlan(64), BatchPlan(8, 3, 2)])
@pytest.mark.parametrize("dataset", [tensors(), Subset(tensors(), [*range(250, 10, -1), -1])], ids=["all", "subset"])
def test_batches_gathered_on_device_equal_a_data_loaders(batch: BatchPlan, dataset: Any) -> None:
    source = Source(dataset, shuffle=True)
    rows = rows_of(source)
    assert all(tensor.is_cuda and len(tensor) == len(dataset) for tensor in rows.tensors)
    loader, sampled = RowLoader(source, rows, batch, 0, seed=1), TrainLoader(source, batch, 0, seed=1)
    for step, expected in zip(loader.epoch(1, 1), sampled.epoch(1, 1), strict=True):
        for micro, other in zip(step.microbatches, expected.microbatches, strict=True):
            assert isinstance(micro.batch, RowBatch)
            assert micro.batch.index.dtype == torch.int64
            assert micro.batch.index.is_cuda
            assert same(to_device(micro.batch, GPU), other.batch)
        assert loader.indices == sampled.indices


def test_row_indices_of_an_epoch_share_one_tensor() -> None:
    source = Source(tensors(), shuffle=True)
    batches = [
        step.microbatches[0].batch for step in RowLoader(source, rows_of(source), BatchPlan(64), 0, seed=1).epoch(0)
    ]
    assert len({batch.index.untyped_storage().data_ptr() for batch in batches}) == 1


def test_epoch_of_rows_never_synchronizes_with_the_device() -> None:
    """torch raises on every synchronization while the debug mode is on."""
    source = Source(tensors(), shuffle=True)
    loader = RowLoader(source, rows_of(source), BatchPlan(64), 0, seed=1)
    list(loader.epoch(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = [to_device(step.microbatches[0].batch, GPU) for step in loader.epoch(1)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sorted(i for batch in moved for i in batch[-1].tolist()) == list(range(LENGTH))


def test_row_batch_can_be_gathered_in_a_captured_graph() -> None:
    source = Source(tensors(), shuffle=True)
    batches = [
        step.microbatches[0].batch for step in RowLoader(source, rows_of(source), BatchPlan(64), 0, seed=1).epoch(0)
    ]
    index = batches[0].index.clone()
    static = RowBatch(batches[0].rows, index)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        static.to(GPU)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken = static.to(GPU)
    for batch in batches[:4]:
        index.copy_(batch.index)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(taken, batch.to(GPU), strict=True))


def test_rows_that_are_too_large_stay_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = torch.cuda.mem_get_info(GPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, free[1]))
    source = Source(Subset(tensors(), range(5, 205)), shuffle=True)
    rows = rows_of(source)
    assert not rows.is_on_device
    loader, sampled = RowLoader(source, rows, BatchPlan(64), 0, seed=1), TrainLoader(source, BatchPlan(64), 0, seed=1)
    assert all(tensor.is_pinned() for tensor in next(loader.epoch(0)).microbatches[0].batch)
    for step, expected in zip(Prefetch(loader, GPU).epoch(0), sampled.epoch(0), strict=True):
        assert same(step.microbatches[0].batch, expected.microbatches[0].batch)


def test_tensors_already_on_the_device_are_used_in_place() -> None:
    x = torch.randn(LENGTH, 4, device=GPU)
    source = Source(Subset(TensorDataset(x), range(100, 200)), shuffle=True)
    rows = rows_of(source)
    assert rows.tensors[0].data_ptr() == x.data_ptr()
    loader = RowLoader(source, rows, BatchPlan(100), 0, seed=1)
    (step,) = loader.epoch(0)
    assert torch.equal(step.microbatches[0].batch.to(GPU)[0], x[[100 + i for i in loader.indices]])


class Large(Dataset[Any]):
    """Samples of 64 KiB, so that a copy takes a while."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((16384,), float(index)), "n": index}


def test_prefetched_batch_stays_intact_during_its_step() -> None:
    """Under memory that is used again at once, with a device that lags far behind the host."""
    source = Source(Large(), shuffle=True, num_workers=2, pin_memory=True)
    prefetch = Prefetch(TrainLoader(source, BatchPlan(16), 0, seed=1, pin_memory=True), GPU)
    busy = torch.randn(4096, 4096, device=GPU)
    sums, expected = [], []
    for _ in range(2):
        for step in prefetch.epoch(0):
            batch = step.microbatches[0].batch
            assert batch["x"].is_cuda
            torch.mm(busy, busy)
            torch.mm(busy, busy)
            sums.append((batch["x"].double().sum(), batch["n"].sum()))
            expected.append(sum(prefetch.indices))
            del batch, step
    assert len(sums) == 20
    assert [(float(x) / 16384, int(n)) for x, n in sums] == [(float(total), total) for total in expected]


def trained(folder: Path, name: str, data: Any, **settings: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    trainer = Trainer(
        model,
        num_gpus=1,
        batch_size=32,
        epochs=2,
        progress=False,
        capture=False,
        run_dir=str(folder / name),
        **settings,
    )
    trainer.fit(data)
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


class OneByOne(Dataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def test_every_input_path_gives_the_same_weights(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 32, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    rows = trained(tmp_path, "rows", DataLoader(data, shuffle=True))
    single = trained(tmp_path, "single", DataLoader(OneByOne(data), shuffle=True))
    ahead = trained(tmp_path, "ahead", DataLoader(OneByOne(data), shuffle=True, num_workers=2))
    measured = trained(tmp_path, "auto", DataLoader(OneByOne(data), shuffle=True), num_workers="auto")
    assert rows == single == ahead == measured
    assert json.loads((tmp_path / "auto" / "workers" / "rank-0.json").read_text())["rates"]


@pytest.mark.parametrize(
    ("on_device", "state_bytes", "free", "is_on_device"),
    [
        ("auto", 0, 50_000, True),
        ("auto", 0, 30_000, False),
        ("auto", 20_000, 50_000, False),
        ("on", 20_000, 4_000, True),
        ("on", 0, 3_000, False),
        ("off", 0, 50_000, False),
    ],
)
def test_rows_are_placed_on_device_within_memory_limits(
    monkeypatch: pytest.MonkeyPatch, on_device: str, state_bytes: int, free: int, is_on_device: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 100_000))
    rows = Rows.of(Source(TensorDataset(torch.zeros(1000))), GPU, on_device, state_bytes)  # 4000 bytes
    assert rows is not None
    assert rows.is_on_device == is_on_device
    assert (rows.placing is None) == (on_device == "off")


def test_data_placement_is_a_decision_and_can_be_overridden(tmp_path: Path) -> None:
    x = torch.randn(LENGTH, 32, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), shuffle=True)
    found = {}
    for name, setting in (("auto", "auto"), ("on", True), ("off", False)):
        found[name] = trained(tmp_path, name, data, data_on_device=setting)
        lines = (tmp_path / name / "events.jsonl").read_text().splitlines()
        (started,) = [event for event in map(json.loads, lines) if event["event"] == "RunStarted"]
        told = [line for line in started["decisions"] if line.startswith("training data on the device")]
        assert len(told) == (name != "off")
        assert all("[data_on_device]" in line for line in told)
    assert found["auto"] == found["on"] == found["off"]


def test_data_on_device_refuses_data_that_is_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data_on_device=True"):
        trained(tmp_path, "refused", DataLoader(OneByOne(tensors())), data_on_device=True)
