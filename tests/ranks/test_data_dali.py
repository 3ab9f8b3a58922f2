"""DALI's iterators as loaders: batches as they come, an epoch at a time.

DALI itself needs a GPU and is not installed here. `DALIGenericIterator` below stands in for it and does what its
documentation says of iterating: a list with a dict for each pipeline, StopIteration at the end of an epoch, nothing
more before `reset`, which is ignored in the middle of an epoch, and `auto_reset`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from distributed import Trainer
from distributed.core.errors import DataError, PlanError
from distributed.core.plan import BatchPlan
from distributed.data.loading.dali import DaliBatches
from distributed.data.loading.loader import EvalLoader
from distributed.data.loading.stream_loader import StreamLoader
from distributed.data.source import read_source
from distributed.testing import run_ranks


class DALIGenericIterator:
    __module__ = "nvidia.dali.plugin.pytorch"

    def __init__(
        self, samples: torch.Tensor, batch_size: int, auto_reset: bool | str = False, pipelines: int = 1
    ) -> None:
        self._samples, self.batch_size, self._auto_reset = samples, batch_size, auto_reset
        self._at, self._pipelines, self.epochs = 0, pipelines, 0

    def __iter__(self) -> DALIGenericIterator:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        if self._at >= len(self._samples):
            if self._auto_reset in (True, "yes"):
                self.reset()
            raise StopIteration
        some = self._samples[self._at : self._at + self.batch_size]
        self._at += self.batch_size
        return [{"data": some[:, None].float().expand(-1, 3), "label": (some % 2)}] * self._pipelines

    def reset(self) -> None:
        assert self._at >= len(self._samples), "a warning in DALI, and no reset"
        self._at, self.epochs = 0, self.epochs + 1


def loader(iterator: Any, **batch: Any) -> StreamLoader:
    plan = BatchPlan(iterator.batch_size, **batch)
    source = read_source(iterator, "train_loader")
    return StreamLoader(source, plan, 0, seed=0, split="dataset", agree=lambda n, m: (n, m))


def samples(step: Any) -> list[int]:
    return [int(i) for micro in step.microbatches for i in micro.batch["data"][:, 0]]


@pytest.mark.parametrize("auto_reset", [False, True, "yes"])
def test_dali_batches_are_used_unchanged_in_every_epoch(auto_reset: bool | str) -> None:
    iterator = DALIGenericIterator(torch.arange(10), 4, auto_reset)
    train = loader(iterator)
    for _ in range(3):
        steps = list(train.epoch(0))
        assert [samples(step) for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert [step.samples for step in steps] == [4, 4, 2]
        assert [micro.size for step in steps for micro in step.microbatches] == [4, 4, 2]
    assert iterator.epochs == 3


def test_dali_micro_batches_of_a_step_keep_their_contents() -> None:
    steps = list(loader(DALIGenericIterator(torch.arange(10), 2), accumulation=2).epoch(0))
    assert [samples(step) for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_resumed_dali_epoch_skips_used_batches() -> None:
    assert [samples(step) for step in loader(DALIGenericIterator(torch.arange(10), 4)).epoch(0, 2)] == [[8, 9]]


def test_unfinished_dali_epoch_is_drained_before_the_next() -> None:
    train = loader(DALIGenericIterator(torch.arange(10), 4))
    left = train.epoch(0)
    next(left)
    left.close()
    assert [samples(step) for step in train.epoch(1)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_dali_columns_select_inputs_and_target() -> None:
    source = read_source(DaliBatches(DALIGenericIterator(torch.arange(5), 4), columns=("data", "label")), "val_loader")
    found = [(data[:, 0].tolist(), label.tolist(), size) for (data, label), size in EvalLoader(source, 4, 0, 1)]
    assert found == [([0, 1, 2, 3], [0, 1, 0, 1], 4), ([4], [0], 1)]
    with pytest.raises(DataError, match="no output 'image'"):
        next(DaliBatches(DALIGenericIterator(torch.arange(5), 4), columns=("image",)).batches())


def test_unusable_dali_sources_are_refused() -> None:
    one = DaliBatches(DALIGenericIterator(torch.arange(5), 4))
    with pytest.raises(DataError, match="batches of 4"):
        one.check(BatchPlan(8), "dataset")
    with pytest.raises(DataError, match="iterable_split='dataset'"):
        one.check(BatchPlan(4, 2), "share")
    with pytest.raises(DataError, match="2 pipelines"):
        next(DaliBatches(DALIGenericIterator(torch.arange(5), 4, pipelines=2)).batches())
    with pytest.raises(DataError, match="around a DALI iterator"):
        read_source(DataLoader(one, batch_size=None), "train_loader")
    with pytest.raises(DataError, match="was given a list"):
        DaliBatches([1, 2])
    with pytest.raises(TypeError, match="let every rank build its own"):
        pickle.dumps(one)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def fit(folder: str, iterator: Any, **settings: Any) -> Any:
    data = DaliBatches(iterator, columns=("data", "label"))
    more = {"run_dir": folder, "progress": False, "epochs": 2, "learning_rate": 0.05}
    trainer = Trainer(model(), **more | settings)
    return trainer.fit(data), trainer


def test_trainer_resumes_dali_data_in_mid_epoch(tmp_path: Path) -> None:
    def iterator() -> Any:
        return DALIGenericIterator(torch.arange(22), 4)

    _, whole = fit(f"{tmp_path}/whole", iterator())
    kept = {"checkpoint_dir": f"{tmp_path}/kept"}
    fit(f"{tmp_path}/cut", iterator(), max_steps=9, **kept)
    history, again = fit(f"{tmp_path}/again", iterator(), resume_from_checkpoint=True, **kept)
    assert history.steps == 12
    assert torch.equal(whole.model.weight, again.model.weight)


def test_bitwise_with_dali_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="stream"):
        fit(f"{tmp_path}/run", DALIGenericIterator(torch.arange(22), 4), reproducible="bitwise")


def sharded(folder: str) -> tuple[int, int, list[float]]:
    rank = torch.distributed.get_rank()
    mine = torch.arange(0, 12) if rank == 0 else torch.arange(12, 20)  # shards of different sizes
    history, trainer = fit(folder, DALIGenericIterator(mine, 4), iterable_split="dataset", num_gpus=2)
    return history.steps, history.samples, trainer.model.weight.flatten().tolist()


def test_every_rank_reads_its_own_dali_shard(tmp_path: Path) -> None:
    first, second = run_ranks(sharded, 2, f"{tmp_path}/run")
    assert first == second
    assert first[:2] == (6, 40), "three steps an epoch, as many as the larger shard has, and every sample once"
