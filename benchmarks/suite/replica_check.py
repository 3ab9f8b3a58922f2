"""What comparing ranks costs: time in the replica check over the time of all steps, in one and the same run.

python benchmarks/suite/replica_check.py --steps 1000 --json benchmarks/suite/replica-check.json
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
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.testing import run_ranks
from distributed.train.checks.replicas import ReplicaCheck

BATCH = 256
ONCE = 2  # comparisons that agree on sizes, load kernels and connect; the second comes with the optimizer's state


def train(steps: int, folder: str, device: str, capture: bool | str) -> tuple[float, list[float]]:
    """Seconds of one rank: all of its steps, and of each of the calls that compare ranks.

    On a GPU the steps that are still computed when a call comes are waited for before the clock starts.
    """
    calls: list[float] = []

    def timed(name: str) -> None:
        plain = getattr(ReplicaCheck, name)

        def measured(self: ReplicaCheck, *args: Any, **options: Any) -> Any:
            if device != "cpu":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            result = plain(self, *args, **options)
            calls.append(time.perf_counter() - begun)
            return result

        setattr(ReplicaCheck, name, measured)

    timed("compare")
    if device != "cpu":  # there, compare reads at once
        timed("settle")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * 200, 784), torch.randint(0, 10, (BATCH * 200,)))
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    trainer = Trainer(
        model,
        batch_size=BATCH,
        loss_fn=nn.CrossEntropyLoss(),
        epochs=1000,
        max_steps=steps,
        progress=False,
        checkpoint_dir=f"{folder}/checkpoints",
        checkpoint_frequency=f"{10 * steps} steps",
        device=device,
        share_gpus=device != "cpu",
        capture=capture,
    )
    begun = time.perf_counter()
    trainer.fit(DataLoader(data, batch_size=BATCH, shuffle=True))
    return time.perf_counter() - begun, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--capture", action="store_true", help="steps as CUDA graphs, also where ranks share a GPU")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"replica-check-{os.getpid()}")
    capture = True if asked.capture else "auto"
    ranks = run_ranks(train, asked.ranks, asked.steps, str(folder), asked.device, capture, device=asked.device)
    loop, calls = max(ranks, key=lambda rank: sum(rank[1]) / rank[0])
    once = calls[: ONCE if asked.device == "cpu" else 2 * ONCE]  # on a GPU the result is read in a call of its own
    later = calls[len(once) :]
    without_waits = sum(min(call) for call in zip(*(calls for _, calls in ranks), strict=True))
    record = {
        "benchmark": "replica-check",
        "unit": "seconds of the rank with the largest part; the loop's seconds have the comparison's in them",
        "target_part": 0.005,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "processes": asked.ranks,
            "steps": asked.steps,
            "model": "MLP 784-512-10",
            "batch": BATCH,
            "captured": asked.capture,
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "calls": len(calls),
        "compare_s": sum(calls),
        "loop_s": loop,
        "part": sum(calls) / loop,
        "us_a_step": sum(calls) / asked.steps * 1e6,
        "once_s": sum(once),
        "later_us_a_step": sum(later) / asked.steps * 1e6,
        "median_call_us": statistics.median(later) * 1e6,
        "part_of_the_last_to_come": without_waits / loop,  # the others wait for it here, or in the next gradients
    }
    print(
        f"{record['part']:.3%} of {asked.steps} steps went into comparing ranks, {record['us_a_step']:.1f} us a step, "
        f"{record['later_us_a_step']:.1f} without the first {ONCE} comparisons ({1e3 * record['once_s']:.0f} ms), "
        f"{record['part_of_the_last_to_come']:.3%} without the wait for a slower rank"
    )
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
