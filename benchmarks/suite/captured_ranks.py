"""Host time of a step of several ranks: captured as a CUDA graph with NCCL inside, as written, and a bare DDP loop.

python benchmarks/suite/captured_ranks.py --json benchmarks/suite/captured-ranks-h200.json

The clock is that of the thread that launches: groups of steps between two waits for the device, few enough to fit into
CUDA's queue. With fewer GPUs than ranks the ranks share them, which shows in the device's time and not in the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.strategies.replicated import Replicated
from distributed.testing import run_ranks
from distributed.train.capture.capture import StepCapture

BATCH, GROUP, WARM = 256, 8, 160  # samples of a rank; steps that are timed together; steps before the first that is
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


class Clock:
    """`tick` comes before every step: the host's time of each group, and what the last one launched."""

    def __init__(self, steps: int) -> None:
        self.groups: list[float] = []
        self.launched: Counter[str] = Counter()
        self._step, self._last, self._begun = 0, steps, 0.0
        self._profile: profile | None = None

    def tick(self) -> None:
        now, done = time.perf_counter(), self._step - WARM
        self._step += 1
        if done < 0 or done % GROUP:
            return
        if self._profile is not None:
            self._profile.stop()
            self.launched = Counter(
                {event.key: event.count for event in self._profile.key_averages() if event.key in LAUNCHES}
            )
            self._profile = None
        elif done:
            self.groups.append((now - self._begun) / GROUP)
        torch.cuda.synchronize()
        if self._step + 2 * GROUP > self._last and not self.launched:
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.start()
        self._begun = time.perf_counter()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def make_rows(steps: int, ranks: int) -> TensorDataset:
    samples = BATCH * ranks * min(steps, 100)
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 784, generator=drawn), torch.randint(0, 10, (samples,), generator=drawn))


def bare(steps: int, folder: str) -> Clock:
    """What a script does by hand, with rows that lie on the device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    clock, model = Clock(steps), make_model().cuda()
    replicated, loss_fn = DistributedDataParallel(model, gradient_as_bucket_view=True), nn.CrossEntropyLoss()
    optimizer = make_optimizer(model.parameters())
    x, y = (part.cuda().split(BATCH) for part in make_rows(steps, ranks).tensors)
    for step in range(steps):
        clock.tick()
        number = (step * ranks + rank) % len(x)
        optimizer.zero_grad()
        loss_fn(replicated(x[number]), y[number]).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return clock


def ours(capture: bool) -> Callable[[int, str], Clock]:
    def train(steps: int, folder: str) -> Clock:
        clock, kind = Clock(steps), StepCapture if capture else Replicated
        plain: Any = kind.train_step

        def timed(self: Any, *args: Any, **options: Any) -> Any:
            clock.tick()
            return plain(self, *args, **options)

        kind.train_step = timed  # type: ignore[method-assign, assignment]
        try:
            trainer = Trainer(
                make_model(),
                loss_fn=nn.CrossEntropyLoss(),
                optimizer=make_optimizer,
                batch_size=BATCH,
                epochs=1000,
                max_steps=steps,
                capture=capture,
                progress=False,
                share_gpus=True,
                device="cuda",
                log_every_n_steps=100,
                run_dir=folder,
            )
            trainer.fit(DataLoader(make_rows(steps, dist.get_world_size()), batch_size=BATCH, shuffle=True))
        finally:
            kind.train_step = plain  # type: ignore[method-assign]
        return clock

    return train


CONTENDERS: dict[str, Callable[[int, str], Clock]] = {
    "bare DDP": bare,
    "eager": ours(capture=False),
    "captured": ours(capture=True),
}


def measure(steps: int, rounds: int, folder: str) -> dict[str, Any]:
    """This rank's figures of all contenders, which take turns."""
    groups: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    launched: dict[str, dict[str, float]] = {}
    for turn in range(rounds):
        for name, train in CONTENDERS.items():
            clock = train(steps, f"{folder}/{turn}-{name.replace(' ', '-')}")
            groups[name] += clock.groups
            launched[name] = {call: count / GROUP for call, count in clock.launched.items()}
    return {"groups": groups, "launched": launched}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"captured-ranks-{os.getpid()}")
    ranks = run_ranks(measure, asked.ranks, asked.steps, asked.rounds, str(folder), device="cuda")
    rows = {}
    for name in CONTENDERS:
        by_rank = [[1e6 * group for group in rank["groups"][name]] for rank in ranks]
        slowest = max(by_rank, key=statistics.median)
        low, middle, high = statistics.quantiles(slowest, n=4)
        launched = ranks[0]["launched"][name]
        rows[name] = {"host_us_a_step": middle, "low": low, "high": high, "launches_a_step": launched}
        print(f"{name:10} {middle:8.1f} us of the host a step ({low:.1f} to {high:.1f}), launches a step: {launched}")
    record = {
        "benchmark": "captured-ranks",
        "unit": "microseconds of the launching thread a step, of the slower rank: median and quartiles of groups",
        "target_ratio": 3.0,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "processes": asked.ranks,
            "gpus": torch.cuda.device_count(),
            "steps": asked.steps,
            "rounds": asked.rounds,
            "group": GROUP,
            "model": "MLP 784-512-10",
            "batch": BATCH,
            "bytes_reduced_a_step": 4 * sum(p.numel() for p in make_model().parameters()),
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "contenders": rows,
        "eager_over_captured": rows["eager"]["host_us_a_step"] / rows["captured"]["host_us_a_step"],
        "bare_over_captured": rows["bare DDP"]["host_us_a_step"] / rows["captured"]["host_us_a_step"],
    }
    print(f"eager over captured: {record['eager_over_captured']:.1f} x")
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
