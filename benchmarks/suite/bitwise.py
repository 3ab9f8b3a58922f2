"""What `reproducible="bitwise"` costs against the normal mode: samples a second of the same training, interleaved."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.trainers.trainer import Trainer


@dataclass(frozen=True)
class BitwiseCost:
    processes: int
    virtual_ranks: int
    rounds: int
    normal_samples_per_second: float
    bitwise_samples_per_second: float
    load_average: float | None

    @property
    def slowdown(self) -> float:
        return self.normal_samples_per_second / self.bitwise_samples_per_second

    def to_dict(self) -> dict[str, Any]:
        found = {"benchmark": "bitwise", "machine": describe_machine(), "versions": describe_versions()}
        return found | {"slowdown": self.slowdown} | asdict(self)


def measure_bitwise(
    *, processes: int, virtual_ranks: int, rounds: int, notify: Callable[[str, int, int], None] = lambda *_: None
) -> BitwiseCost:
    """A perceptron of 2.4 million parameters, 128 samples a rank and step; the first epoch of each run warms up."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(4096, 512, generator=generator), torch.randint(0, 10, (4096,), generator=generator)
    )
    rates: dict[str, list[float]] = {"off": [], "bitwise": []}
    for number in range(rounds):
        for mode, taken in rates.items():
            notify(f"reproducible={mode}", number, rounds)
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
            )
            more: dict[str, Any] = {"reproducible": mode}
            more |= {"virtual_ranks": virtual_ranks} if mode == "bitwise" else {}
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(
                    model,
                    num_gpus=processes,
                    batch_size=128,
                    epochs=3,
                    progress=False,
                    run_dir=f"{folder}/run",
                    **more,
                )
                taken += [record.samples_per_second for record in trainer.fit(data).epochs[1:]]
    normal, bitwise = (statistics.median(taken) for taken in rates.values())
    return BitwiseCost(processes, virtual_ranks, rounds, normal, bitwise, load_average())
