"""Wall time to the loss of a dense run over a slow link: local SGD and DiLoCo beside it, two hosts, one rank on each.

python benchmarks/suite/little_communication.py --json benchmarks/suite/little-communication.json

Hosts are network namespaces whose interfaces are shaped by tc's token bucket, which needs root. Bytes are those that
the interface of host 0 has sent, by the kernel's own count. The clock begins with the first step, and what counts is
when a validation first has the least loss of the dense run, within 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.chaos.hosts import Hosts

WIDTH, PER_RANK, RATE_MBIT, BURST = 2200, 16, 100, "128kb"
WITHIN = 1.01
SEED, HELD_OUT = 1, 360
WAYS: dict[str, dict[str, Any]] = {
    "every_step": {"val_check_interval": 20},
    "local_sgd": {"sync_every_n_steps": 25, "val_check_interval": 25},
    "diloco": {"sync_every_n_steps": 25, "val_check_interval": 25, "outer_learning_rate": 0.7, "outer_momentum": 0.5},
}


def digits() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


def sent_bytes() -> int:
    """What eth0 of this process's network has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))


class Curve(Callback):
    """Seconds, bytes and loss at each validation."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self._begun, self._sent = 0.0, 0

    def on_fit_start(self, run: Any) -> None:
        self._begun, self._sent = time.perf_counter(), sent_bytes()

    def on_validation_end(self, run: Any, metrics: Mapping[str, float]) -> None:
        seconds, sent = time.perf_counter() - self._begun, sent_bytes() - self._sent
        self.points.append({"step": run.step, "seconds": seconds, "bytes": sent, "loss": metrics["val_loss"]})


def train(way: str, steps: int, target: str) -> None:
    """One rank of one way, in its host."""
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )  # fmt: skip
    curve = Curve()
    trainer = Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        callbacks=[curve],
        optimizer="adamw",
        learning_rate=2e-4,
        fused_optimizer=True,
        batch_size=PER_RANK,
        epochs=1000,
        max_steps=steps,
        seed=SEED,
        device="cpu",
        progress=False,
        sanity_val_steps=0,
        synchronization=way,
        run_dir=f"{target}.run",
        certificate_steps=0,
        **WAYS[way],
    )
    data, held_out = digits()
    trainer.fit(data, DataLoader(held_out, batch_size=HELD_OUT // 2))
    if os.environ["RANK"] == "0":
        Path(target).write_text(json.dumps(curve.points))


def measure(way: str, steps: int, folder: str, rate_mbit: float) -> list[dict[str, float]]:
    target = f"{folder}/{way}.json"
    with Hosts(2) as hosts:
        for number in range(2):
            shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{rate_mbit:g}mbit"]
            subprocess.run(hosts[number].command([*shape, "burst", BURST, "latency", "50ms"]), check=True)
        ranks = []
        for number in range(2):
            environ = os.environ | {
                "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29611", "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, __file__, "--train", way, "--steps", str(steps), "--json", target]
            ranks.append(subprocess.Popen(hosts[number].command(command), env=environ, cwd=folder))
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"the ranks of {way} failed")
    found: list[dict[str, float]] = json.loads(Path(target).read_text())
    return found


def reached(points: list[dict[str, float]], loss: float) -> dict[str, float] | None:
    return next((point for point in points if point["loss"] <= loss), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=RATE_MBIT, help="Mbit/s")
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--train", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.train:
        train(asked.train, asked.steps, str(asked.json))
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        curves = {}
        for way in asked.way or WAYS:
            steps = asked.steps if way == "every_step" else 2 * asked.steps
            curves[way] = measure(way, steps, folder, asked.rate)
            print(way, json.dumps(curves[way][-1]), flush=True)
    loss = WITHIN * min(point["loss"] for point in curves["every_step"])
    found = {way: reached(points, loss) for way, points in curves.items()}
    dense = found["every_step"]
    assert dense is not None
    record = {
        "benchmark": "little-communication",
        "unit": "seconds and bytes sent by one host until a validation has the dense run's least loss, within 1 %",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "link": f"{asked.rate:g} Mbit/s (tbf, burst {BURST}) between two hosts, one rank on each, gloo",
            "model": f"MLP 64-{WIDTH}-{WIDTH}-{WIDTH}-10, {64 * WIDTH + 2 * WIDTH**2 + 13 * WIDTH + 10:,} parameters",
            "data": f"scikit-learn's digits, {HELD_OUT} held out",
            "batch": 2 * PER_RANK,
            "optimizer": "AdamW, 2e-4, fused",
            "steps_of_dense": asked.steps,
            "ways": WAYS,
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "loss_to_reach": loss,
        "reached": found,
        "times_as_soon": {w: dense["seconds"] / point["seconds"] for w, point in found.items() if point},
        "times_fewer_bytes": {w: dense["bytes"] / point["bytes"] for w, point in found.items() if point},
        "curves": curves,
    }
    for way, point in found.items():
        if point is None:
            print(f"{way}: not reached")
        else:
            print(
                f"{way}: {point['seconds']:.1f} s, {dense['seconds'] / point['seconds']:.1f} times as soon; "
                f"{point['bytes'] / 2**20:.0f} MiB, step {point['step']:.0f}"
            )
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
