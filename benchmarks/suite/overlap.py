"""How much of DDP's communication hides behind the backward pass: 2 hosts and a link between them, sizes of buckets.

python benchmarks/suite/overlap.py --json benchmarks/suite/overlap.json

The hosts are network namespaces of this machine, so root and iproute2 are needed. gloo's threads share the cores with
what computes. Sizes take turns in one run; `auto` has chosen before. Then a step of four micro-batches by torch's own
DDP: only the last reduces, as ours does, or each of them; and how long the parts of a step take, by which it is said
what a second reduction in the middle of such a step could gain at the most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.suite.shaped_hosts import run_on_hosts
from distributed import OverlappedTrainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.train.loop_parts.bucket_trial import CAPS_MB, steps_of_trial

WIDTH, LAYERS = 512, 24  # 1 MB of gradients a layer
WAYS: dict[str, Any] = {"1": 1, "5": 5, "25": 25, "100": 100, "auto": "auto"}
MICRO_BATCHES, WARM, TURN = 4, 3, 4  # steps that do not count; steps of a turn, of which the last is measured


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return torch.randn(size, WIDTH, generator=drawn), torch.randint(0, WIDTH, (size,), generator=drawn)


class SizeUnderTest:
    """A trainer with one size of buckets, and what its steps took."""

    def __init__(self, cap_mb: Any, batch: int, folder: str) -> None:
        self._batch = batch
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.trainer = OverlappedTrainer(
            model,
            optimizer,
            int(os.environ["WORLD_SIZE"]),
            bucket_cap_mb=cap_mb,
            log_every_n_steps=TURN,
            device="cpu",
            run_dir=folder,
        )
        self.seconds: list[float] = []
        self.shares: list[dict[str, float]] = []

    def turn(self, steps: int, *, counts: bool = True) -> None:
        for _ in range(steps):
            before = self.trainer.communication
            begun = time.perf_counter()
            self.trainer.train_step_overlapped(make_batch(self._batch))
            took, share = time.perf_counter() - begun, self.trainer.communication
            if not counts:
                continue
            if share is before or share is None:
                self.seconds.append(took)
            else:
                numbers = share._asdict() | {"hidden": share.hidden, "of_possible": share.of_possible}
                self.shares.append(numbers)

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = {"step_s": spread(self.seconds)}
        return found | {name: spread([share[name] for share in self.shares]) for name in self.shares[0]}


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 5), "low": round(low, 5), "high": round(high, 5)}


class AccumulationByHand:
    """Steps of several micro-batches with torch's DDP."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._replicated = DistributedDataParallel(make_model(), bucket_cap_mb=1, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self._replicated.parameters(), lr=1e-3)
        self.seconds: dict[str, list[float]] = {"only the last reduces": [], "each reduces": []}
        self.parts: dict[str, list[float]] = {"forward_s": [], "backward_s": []}

    def step(self, way: str) -> None:
        begun = time.perf_counter()
        for number in range(MICRO_BATCHES):
            is_held = way == "only the last reduces" and number < MICRO_BATCHES - 1
            x, target = make_batch(self._batch)
            with self._replicated.no_sync() if is_held else nullcontext():
                first = time.perf_counter()
                loss = nn.functional.cross_entropy(self._replicated(x), target)
                second = time.perf_counter()
                (loss / MICRO_BATCHES).backward()
            if is_held:  # nothing is sent meanwhile
                self.parts["forward_s"].append(second - first)
                self.parts["backward_s"].append(time.perf_counter() - second)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds[way].append(time.perf_counter() - begun)


def measure(rounds: int, batch: int, folder: str, result: Path) -> None:
    """On one rank."""
    sizes = {name: SizeUnderTest(cap_mb, batch, f"{folder}/{name}") for name, cap_mb in WAYS.items()}
    for name, size in sizes.items():
        size.turn(steps_of_trial(CAPS_MB) + 1 if name == "auto" else WARM, counts=False)
    for number in range(rounds):
        for size in list(sizes.values())[:: 1 if number % 2 else -1]:
            size.turn(1, counts=False)
            size.turn(TURN)
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {rounds}", flush=True)
    by_hand = AccumulationByHand(batch)
    for number in range(WARM + rounds):
        for way in by_hand.seconds:
            by_hand.step(way)
        if number == WARM - 1:
            by_hand.seconds = {way: [] for way in by_hand.seconds}
            by_hand.parts = {part: [] for part in by_hand.parts}
    if dist.get_rank() != 0:
        return
    chosen = sizes["auto"].trainer.bucket_cap_mb
    record = {"sizes": {name: size.record() for name, size in sizes.items()}, "chosen_mb": chosen}
    record["accumulation"] = {way: {"step_s": spread(took)} for way, took in by_hand.seconds.items()}
    record["parts"] = {part: spread(took) for part, took in by_hand.parts.items()}
    result.write_text(json.dumps(record), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=192, help="of each rank")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help="where the ranks write")
    parser.add_argument("--rank", action="store_true", help="this process is one")
    asked = parser.parse_args()
    folder = asked.folder or str(Path(os.environ.get("TMPDIR", "/tmp"), f"overlap-{os.getpid()}"))
    result = Path(folder, "result.json")
    if asked.rank:
        torch.set_num_threads(1)
        measure(asked.rounds, asked.batch, folder, result)
        return
    before = os.getloadavg()[0]
    Path(folder).mkdir()
    arguments = ["--rounds", str(asked.rounds), "--batch", str(asked.batch), "--folder", folder]
    run_on_hosts(Path(__file__), arguments, hosts=2, ranks_per_host=1, mbit_s=asked.mbit)
    found = json.loads(result.read_text())
    for name, row in found["sizes"].items():
        step, hidden, part = (row[key]["median"] for key in ("step_s", "hidden", "of_possible"))
        print(f"buckets of {name:>4} MB {1e3 * step:8.1f} ms a step, {hidden:4.0%} hidden, {part:4.0%} of what can be")
    for way, row in found["accumulation"].items():
        print(f"{MICRO_BATCHES} micro-batches, {way}: {1e3 * row['step_s']['median']:.1f} ms a step")
    record = {
        "benchmark": "overlap",
        "unit": "seconds, and parts of 1; median and quartiles",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "hosts": 2,
            "processes": 2,
            "mbit_s": asked.mbit,
            "rounds": asked.rounds,
            "layers": LAYERS,
            "width": WIDTH,
            "batch": asked.batch,
            "gradient_mib": LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / 2**20,
            "micro_batches": MICRO_BATCHES,
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        **found,
    }
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
