"""Every sample once, on two real ranks: samplers and streams with generators of their own, and data that differs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, random_split

from distributed import Trainer
from distributed.core.errors import DataError, PlanError
from distributed.data.checks.ledger import check_ledgers
from distributed.testing import run_ranks

SAMPLES = 40
STEPS = 5  # an epoch


class Unseeded(Sampler):
    """Draws from a new generator each time, as numpy's users do."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        return iter(np.random.default_rng().permutation(SAMPLES).tolist())


class Seeded(Unseeded):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(SAMPLES).tolist())


class Stream(IterableDataset):
    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self):
        order = list(range(SAMPLES))
        if self.by == "global":
            random.shuffle(order)
        elif self.by == "own":
            np.random.default_rng().shuffle(order)
        elif self.by == "rank":
            order = order[torch.distributed.get_rank() :: 2]
            random.shuffle(order)
        for number in order:
            yield torch.tensor([float(number)]), torch.tensor([0.0])


class Recorder(nn.Module):
    """Keeps what it is trained on."""

    def __init__(self, into: list[int]) -> None:
        super().__init__()
        self.layer, self.into = nn.Linear(1, 1), into

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.into.extend(int(value) for value in x.flatten())
        torch.rand(3 + int(os.environ["RANK"]))  # a model that draws, each rank as much as it likes
        return self.layer(x)


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(float(SAMPLES))[:, None], torch.zeros(SAMPLES, 1))


class Ran(NamedTuple):
    seen: list[int]  # what this rank was trained on
    run_dir: str

    @property
    def told(self) -> int:
        """How often the run said that an order cannot be drawn again."""
        return (Path(self.run_dir) / "events.jsonl").read_text().count("does not draw again")


def fit(loader: DataLoader, validation: DataLoader | None = None, **settings: Any) -> Ran:
    seen: list[int] = []
    options = {"num_gpus": 2, "batch_size": 4, "progress": False, "device": "cpu", "learning_rate": 1e-9}
    trainer = Trainer(Recorder(seen), loss_fn=nn.MSELoss(), **options | settings)
    return Ran(seen, trainer.fit(loader, validation).run_dir)


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (DataError, PlanError) as refused:
        return str(refused)
    return "it went through"


def cases(folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])

    def resumed(name: str, make: Callable[[], DataLoader], **settings: Any) -> dict[str, Any]:
        """Two steps into the second of three epochs, and on from there."""
        own = {"epochs": 3, "checkpoint_dir": f"{folder}/{name}"} | settings
        runs = fit(make(), max_steps=STEPS + 2, **own), fit(make(), resume_from_checkpoint=True, **own)
        return {"seen": [run.seen for run in runs], "told": [run.told for run in runs]}

    def sampled(kind: type[Sampler]) -> Callable[[], DataLoader]:
        return lambda: DataLoader(numbers(), batch_size=4, sampler=kind())

    def streamed(by: str) -> Callable[[], DataLoader]:
        return lambda: DataLoader(Stream(by), batch_size=4)

    def built(seed: int) -> DataLoader:
        part, _ = random_split(numbers(), [30, 10], generator=torch.Generator().manual_seed(seed))
        return DataLoader(part, batch_size=4)

    found: dict[str, Any] = {
        "unseeded sampler": resumed("unseeded", sampled(Unseeded)),
        "seeded sampler": resumed("seeded", sampled(Seeded)),
        "stream": resumed("stream", streamed("global")),
        "streams of their own": resumed("own", streamed("rank"), iterable_split="dataset"),
    }
    run = fit(sampled(Unseeded)(), sample_ledger=True, epochs=2)
    found["ledger"] = str(check_ledgers(f"{run.run_dir}/ledger", SAMPLES))
    refused = {
        "own stream": lambda: fit(streamed("own")()),
        "split stream": lambda: fit(streamed("rank")()),
        "validation": lambda: fit(streamed("global")(), streamed("own")()),
        "datasets": lambda: fit(built(rank)),
        "validation data": lambda: fit(built(0), built(rank)),
        "seeds": lambda: fit(DataLoader(numbers(), batch_size=4, shuffle=True), seed=rank),
    }
    found |= {name: refusal(call) for name, call in refused.items()}
    found["unchecked"] = len(fit(streamed("own")(), sample_check=False).seen)
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(cases, 2, str(tmp_path_factory.mktemp("samples")))


@pytest.mark.parametrize("name", ["unseeded sampler", "seeded sampler", "stream", "streams of their own"])
def test_every_sample_is_used_once_an_epoch_after_resume(name: str, by_rank: Any) -> None:
    before, after = zip(*(found[name]["seen"] for found in by_rank), strict=True)
    whole, part = SAMPLES // 2, 2 * 4  # of a rank: an epoch, and two steps of the next
    assert sorted(i for seen in before for i in seen[:whole]) == list(range(SAMPLES))
    second = [i for seen in before for i in seen[whole:]] + [i for seen in after for i in seen[: whole - part]]
    assert sorted(second) == list(range(SAMPLES)), "the epoch that both have a part of"
    assert sorted(i for seen in after for i in seen[whole - part :]) == list(range(SAMPLES))


def test_seeded_sampler_keeps_its_order_after_resume(by_rank: Any) -> None:
    rng = np.random.default_rng(0)
    *_, third = (rng.permutation(SAMPLES).tolist() for _ in range(3))
    mine, theirs = (found["seeded sampler"]["seen"][1][-SAMPLES // 2 :] for found in by_rank)
    steps = [[*mine[at : at + 4], *theirs[at : at + 4]] for at in range(0, SAMPLES // 2, 4)]
    assert [sample for step in steps for sample in step] == third


def test_sampler_order_lost_on_resume_is_warned(by_rank: Any) -> None:
    assert by_rank[0]["unseeded sampler"]["told"] == [0, 1]
    assert by_rank[0]["seeded sampler"]["told"] == [0, 0]


def test_ledgers_of_a_sampler_with_its_own_generator_are_exact(by_rank: Any) -> None:
    assert by_rank[0]["ledger"] == f"exactly once: {2 * SAMPLES} samples in {2 * STEPS} steps"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own stream", "the ranks do not read the same stream: until step 1 of epoch 1, rank 1 has other samples"),
        ("split stream", "iterable_split='dataset'"),
        ("validation", "the ranks do not read the same stream: in an evaluation, rank 1 has"),
        ("datasets", "the ranks' datasets differ: dataset.indices of train_loader"),
        ("validation data", "the ranks' datasets differ: dataset.indices of val_loader"),
        ("seeds", "rank 1 plans another seed than rank 0: it has seed 1, not 0"),
    ],
)
def test_ranks_with_different_data_are_refused(name: str, message: str, by_rank: Any) -> None:
    for found in by_rank:
        assert message in found[name]


def test_data_comparison_of_ranks_can_be_turned_off(by_rank: Any) -> None:
    assert [found["unchecked"] for found in by_rank] == [SAMPLES // 2] * 2
