"""What a parameter server's workers gain where ranks are late in turn, and where one is always: dense steps beside it.

Every rank sleeps in its forward pass in place of computing: `passing`: each in a tenth of its steps, drawn anew, for
seven times as long as in the others; `lasting`: rank 1 in every step for three times as long as the others.

python benchmarks/suite/asynchronous.py --rounds 5 --json benchmarks/suite/asynchronous.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.testing import run_ranks

STEP_S, LATE, PART, SLOW = 0.01, 7, 0.1, 3
BOUNDS = (None, 0, 1, 2, 4, 8)  # None: dense training


class Late(nn.Module):
    """A model whose forward pass takes as long as its rank's delays say."""

    def __init__(self, delays: list[float]) -> None:
        super().__init__()
        self.layer, self.delays = nn.Linear(64, 10), iter(delays)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(next(self.delays, STEP_S))
        found: torch.Tensor = self.layer(x)
        return found


def delays_of(kind: str, rank: int, steps: int, number: int) -> list[float]:
    if kind == "lasting":
        return [STEP_S * (SLOW if rank == 1 else 1)] * steps
    generator = torch.Generator().manual_seed(1000 * number + rank)
    late = torch.rand(steps, generator=generator) < PART
    return [STEP_S * (LATE if is_late else 1) for is_late in late.tolist()]


def train(kind: str, bound: int | None, steps: int, number: int, folder: str) -> float:
    """Milliseconds of a step."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    apart: dict[str, Any] = {"synchronization": "asynchronous", "max_staleness": bound} if bound is not None else {}
    data = TensorDataset(torch.randn(8 * ranks * steps, 64), torch.randint(0, 10, (8 * ranks * steps,)))
    trainer = Trainer(
        Late(delays_of(kind, rank, steps, number)),
        batch_size=8,
        loss_fn=nn.CrossEntropyLoss(),
        epochs=1,
        log_every_n_steps=10 * steps,
        progress=False,
        run_dir=f"{folder}/{kind}-{bound}-{number}",
        checkpoint_frequency=f"{10 * steps} steps",
        **apart,
    )
    return 1e3 * trainer.fit(data).epochs[0].seconds / steps


def measure(rounds: int, steps: int, folder: str) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {"passing": {}, "lasting": {}}
    for number in range(rounds):
        for kind, times in found.items():
            for bound in BOUNDS:
                name = "dense" if bound is None else f"max_staleness={bound}"
                times.setdefault(name, []).append(train(kind, bound, steps, number, folder))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"asynchronous-{os.getpid()}")
    found: dict[str, dict[str, list[float]]] = run_ranks(measure, asked.ranks, asked.rounds, asked.steps, str(folder))[
        0
    ]
    record = {
        "benchmark": "asynchronous",
        "unit": "milliseconds of a step, median over the rounds; of dense: median of the ratios within a round",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"processes": asked.ranks, "steps": asked.steps, "rounds": asked.rounds, "step_s": STEP_S},
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "ms_a_step": {
            kind: {name: statistics.median(times) for name, times in of.items()} for kind, of in found.items()
        },
        "of_dense": {
            kind: {
                name: statistics.median(t / d for t, d in zip(times, of["dense"], strict=True))
                for name, times in of.items()
            }
            for kind, of in found.items()
        },
    }
    text = json.dumps(record, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
