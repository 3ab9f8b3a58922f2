"""A rank that is slow on real ranks is told by rank 0, by what slows it; ranks that are alike are not told of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed import Trainer
from distributed.core.env import WorkerEnv, worker_env
from distributed.core.events import RankSlow, StepEnded, parse_event
from distributed.runtime.session import Session
from distributed.testing import run_ranks
from distributed.train.stragglers.links import Links
from distributed.train.stragglers.pace import RankPace
from distributed.train.stragglers.stragglers import Stragglers

SLOW = 1
SAMPLES = 90
USUAL_S, MORE_S = 0.01, 0.04


class Numbers(Dataset):
    """Samples that take a while to get, on one rank longer than on the others."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return torch.full((4,), float(index)), torch.tensor(index % 2)


class Model(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(4, 2), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(x)


def train(cause: str, settings: dict[str, Any]) -> str:
    """What rank 0 wrote down of a run in which one rank is slow by a cause."""
    seconds = {name: USUAL_S + MORE_S * (dist.get_rank() == SLOW and name == cause) for name in ("data", "compute")}
    data = DataLoader(Numbers(seconds["data"]), batch_size=1)
    trainer = Trainer(Model(seconds["compute"]), log_every_n_steps=5, progress=False, **settings)
    history = trainer.fit(data)
    return (Path(history.run_dir) / "events.jsonl").read_text() if dist.get_rank() == 0 else ""


BITWISE = {"reproducible": "bitwise", "virtual_ranks": 2}


@pytest.mark.parametrize(
    ("cause", "ranks", "settings"),
    [
        ("data", 3, {}),
        ("compute", 3, {}),
        ("nothing", 3, {}),
        ("compute", 3, {"gradient_accumulation_steps": 2, "epochs": 2}),
        ("data", 2, BITWISE),
        ("compute", 2, BITWISE),
    ],
)
def test_straggler_is_reported_once_with_its_cause(cause: str, ranks: int, settings: dict[str, Any]) -> None:
    text = run_ranks(train, ranks, cause, settings | {"num_gpus": ranks})[0]
    events = [parse_event(line) for line in text.splitlines()]
    assert sum(isinstance(event, StepEnded) for event in events) >= 6, "there was enough to look at"
    told = [event for event in events if isinstance(event, RankSlow)]
    assert [(event.rank, event.cause) for event in told] == ([] if cause == "nothing" else [(SLOW, cause)])
    assert all(event.ratio > 1.3 for event in told)


def probed(slow: int) -> list[float]:
    """What this rank finds of its link in three probes; the messages of one rank are late."""
    env = worker_env()
    assert env is not None
    if env.rank == slow:
        send = dist.send

        def late(*args: Any, **options: Any) -> None:
            time.sleep(0.02)
            send(*args, **options)

        dist.send = late
    links = Links.of(Session(env, torch.device("cpu"), None))
    assert links is not None
    found = []
    for _ in range(3):
        dist.barrier()
        links.probe()
        found.append(links.take())
    assert links.take() == 0.0, "a probe counts once"
    return found


@pytest.mark.parametrize(("ranks", "slow"), [(3, 0), (3, 2), (4, 1)])
def test_straggler_by_communication_is_not_its_neighbours(ranks: int, slow: int) -> None:
    probes = zip(*run_ranks(probed, ranks, slow), strict=True)
    stragglers = Stragglers()
    told = []
    for step, seconds in enumerate(probes):
        paces = [RankPace(0.0, 0.05, link_s) for link_s in seconds]
        told += stragglers.look(paces, step=step, step_s=0.1, time=0.0)
    assert [(event.rank, event.cause) for event in told] == [(slow, "communication")]


def test_two_ranks_have_no_link_probe() -> None:
    assert Links.of(Session(WorkerEnv(world_size=2), torch.device("cpu"), None)) is None
