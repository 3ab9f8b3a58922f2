"""Which loaders are validated, under which names; what is wrong with them is told at once, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from distributed import Trainer, whole_set
from distributed.core.errors import ConfigError, DataError, DistributedError, PlanError, TaskError
from distributed.data.named_sources import read_sources
from distributed.data.source import read_source


def data(samples: int = 12) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 4), torch.randint(0, 2, (samples,)))


class Uncounted(Dataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(4), 0


class Streamed(Dataset):
    """A stream that is not declared as one."""

    def __iter__(self) -> Any:
        yield torch.zeros(4), 0


class Words(IterableDataset):
    def __iter__(self) -> Any:
        yield torch.zeros(4), 0


def test_sets_are_named_by_their_keys_or_places() -> None:
    loader = DataLoader(data(), batch_size=4)
    assert list(read_sources(loader, "val_loader")) == [""]
    assert list(read_sources([loader], "val_loader")) == [""]
    assert list(read_sources([loader, data()], "val_loader")) == ["0", "1"]
    assert list(read_sources({"clean": loader, "a.b-1": Words()}, "val_loader")) == ["clean", "a.b-1"]


def test_what_reads_all_rows_drops_none() -> None:
    """A prediction of fewer rows than a batch, by the loader of a training."""
    loader = DataLoader(data(3), batch_size=4, shuffle=True, drop_last=True)
    (source,) = read_sources(loader, "predict_loader", reads_all=True).values()
    assert (source.samples, source.drop_last, source.shuffle) == (3, False, False)


def test_list_of_samples_is_a_dataset() -> None:
    (source,) = read_sources([(torch.zeros(4), 1), (torch.ones(4), 0)], "val_loader").values()
    assert source.samples == 2


def test_all_that_is_wrong_with_a_list_is_reported_at_once() -> None:
    loader = DataLoader(data(), batch_size=4)
    given = {
        "good": loader,
        "read once": loader,
        "iterator": iter(loader),
        "number": 3,
        "nothing": data(0),
        "short": DataLoader(data(3), batch_size=4, drop_last=True),
        "uncounted": Uncounted(),
        "streamed": DataLoader(Streamed(), batch_size=4),
    }
    with pytest.raises(DataError) as refused:
        read_sources(given, "val_loader")
    told = [problem.what for problem in refused.value.problems]
    assert len(told) == 7
    for words in (
        "a loader of val_loader is called 'read once'",
        "val_loader['iterator'] is a",
        "val_loader['number'] is a int",
        "val_loader['nothing'] is empty",
        "val_loader['short'] has 3 samples and drops incomplete batches of 4",
        "val_loader['uncounted'] reads a Uncounted, which has no __len__",
        "val_loader['streamed'] reads a Streamed, which has no __len__ and no __getitem__",
    ):
        assert any(words in line for line in told), words
    with pytest.raises(DataError, match=r"val_loader\[1\] is a str"):
        read_sources([loader, "data.csv"], "val_loader")


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: (x for x in range(3)), lambda: zip([1], [2], strict=True)])
def test_iterators_are_refused_with_a_way_out(make: Any) -> None:
    with pytest.raises(DataError) as refused:
        read_source(make(), "train_loader")
    assert "IterableDataset" in refused.value.problems[0].do


def test_no_loader_at_all_is_refused() -> None:
    for nothing in ({}, {"": None}):
        with pytest.raises(DataError):
            read_sources(nothing, "val_loader")


class Named(nn.Module):
    """As torch names what it wraps a model in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrapped_model_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    parallel = nn.DataParallel(nn.Linear(4, 2))
    for model in (parallel, nn.Sequential(nn.Linear(4, 4), parallel)):
        with pytest.raises(TaskError, match="is a DataParallel") as refused:
            Trainer(model, run_dir=tmp_path / "run", progress=False).fit(data(), batch_size=4)
        assert "pass model.module" in refused.value.problems[0].do
    assert not (tmp_path / "run").exists()


def test_compiled_model_is_trained_under_its_own_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trainer = Trainer(torch.compile(model), num_gpus=1, progress=False, run_dir=tmp_path, device="cpu")
    before = model.weight.detach().clone()
    trainer.fit(data(), batch_size=4)
    assert trainer.model is model
    assert not torch.equal(model.weight, before)
    assert "the model inside of torch.compile" in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("settings", "sets", "message"),
    [
        ({"keep_best": "val_loss", "keep_last": 1}, None, "keep_best names 'val_loss'"),
        ({"keep_best": "val_loss", "keep_last": 1}, ["a", "b"], "keep_best names 'val_loss', which no validation set"),
        ({"val_check_interval": 5}, None, "val_check_interval=5 would have no effect"),
        ({"sanity_val_steps": 1}, None, "sanity_val_steps=1 would have no effect"),
        ({"checkpoint_frequency": "1 validation"}, None, "would have no effect"),
        ({"keep_best": "val_loss", "keep_last": 1, "val_check_interval": 5}, [""], "that metric is known where it is"),
        ({"keep_best": "min:loss", "keep_last": 1, "checkpoint_frequency": "5 steps"}, [""], "at the end of an epoch"),
        ({"scheduler_metric": "val_loss"}, [""], "no scheduler is passed"),
        ({"val_check_interval": 1.5}, [""], "a part of an epoch such as 0.25"),
        ({"val_check_interval": "often"}, [""], "a part of an epoch such as 0.25"),
    ],
)
def test_settings_that_no_validation_serves_are_refused(
    settings: dict[str, Any], sets: list[str] | None, message: str, tmp_path: Path
) -> None:
    validation = None if sets is None else {name: data() for name in sets} if sets != [""] else data()
    options = {"num_gpus": 1, "progress": False, "run_dir": tmp_path / "run", "batch_size": 4}
    with pytest.raises(DistributedError) as refused:
        Trainer(nn.Linear(4, 2), **options).fit(data(), validation, **settings)
    assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_part_of_an_epoch_of_a_stream_is_refused() -> None:
    with pytest.raises(PlanError, match="the training data is a stream"):
        Trainer(nn.Linear(4, 2), val_check_interval=0.5, progress=False).fit(Words(), data(), batch_size=4, max_steps=2)


def test_plateau_scheduler_of_several_sets_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trainer = Trainer(model, optimizer=optimizer, scheduler=scheduler, progress=False)
    with pytest.raises(TaskError, match="scheduler_metric='val_a_loss'"):
        trainer.fit(data(), {"a": data(), "b": data()}, batch_size=4)


def test_whole_set_metric_without_validation_is_refused() -> None:
    trainer = Trainer(nn.Linear(4, 2), metrics={"auc": whole_set(lambda outputs, target: 0.5)}, progress=False)
    with pytest.raises(ConfigError, match="'auc' is one of a whole set, and nothing is validated"):
        trainer.fit(data(), batch_size=4)
