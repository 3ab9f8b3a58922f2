"""What a killed rank costs on NCCL, against torchrun: seconds until all train again, steps lost, the bytes at the end.

Two ranks of each side share one GPU, each as a host of its own, and are killed at random moments. One side runs after
the other: on one GPU each would take the other's time. Our run is then asked to save and end, and its weights are
compared with those of as many steps that nobody disturbed.

python benchmarks/suite/recovery_nccl.py --json benchmarks/suite/recovery-nccl-h200.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from distributed.bench.machine import describe_machine, describe_versions
from distributed.bench.recovery.benchmark import MOMENT_S, kill_rank
from distributed.bench.recovery.results import TARGET_P50_S, Recoveries
from distributed.bench.recovery.runs import SIDES, BenchRun
from distributed.bench.recovery.workload import PACE_S, SAVE_EVERY
from distributed.checkpoint.restore.reading import load


def kill_often(run: BenchRun, kills: int, rng: random.Random, budget_s: float) -> Recoveries:
    """Rank after rank, until there are as many kills or the time is over."""
    deadline, found, made = time.monotonic() + budget_s, [], 0
    while made < kills and time.monotonic() < deadline:
        recovery = kill_rank(run, made % run.ranks, rng.uniform(0, MOMENT_S))
        made += 1
        if recovery is None:
            break
        found.append(recovery)
        print(f"{run.side}: kill {made}: {recovery.seconds:.2f} s, {recovery.lost_steps} steps lost", flush=True)
    return Recoveries(run.side, made, tuple(found))


def newest(run: BenchRun) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the weights of a run's last checkpoint."""
    folder = max(Path(run.run_dir, "checkpoints").glob("step-*"))
    return int(folder.name.removeprefix("step-")), load(str(folder), ranks=()).shared["model"]


def _nccl_version(device: str) -> dict[str, str]:
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device == "cuda" else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--peer-kills", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=600.0, help="after which no more ranks are killed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before, counts = os.getloadavg()[0], {"ours": asked.kills, "torchrun": asked.peer_kills}
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        sides = [side for side in SIDES if counts[side]]
        found, killed, steps = [], {}, 0
        for side in sides:
            with BenchRun(side, asked.ranks, f"{folder}/{side}", device=asked.device) as run:
                found.append(kill_often(run, counts[side], random.Random(asked.seed), asked.budget_s))
                if side == "ours":
                    run.end()
                    steps, killed = newest(run)
        settings = [f"max_steps={steps}"]
        with BenchRun("ours", asked.ranks, f"{folder}/calm", device=asked.device, settings=settings, pace_s=0.0) as run:
            run.wait()
            calm_steps, calm = newest(run)
        is_same = calm_steps == steps and all(torch.equal(calm[name], tensor) for name, tensor in killed.items())
    record: dict[str, Any] = {
        "benchmark": "recovery-nccl",
        "unit": "seconds from SIGKILL until every rank has made a step of the new world",
        "target_p50_s": TARGET_P50_S,
        "machine": describe_machine(),
        "versions": describe_versions() | _nccl_version(asked.device),
        "settings": {
            "processes": asked.ranks,
            "device": asked.device,
            "seed": asked.seed,
            "pace_s": PACE_S,
            "save_every": SAVE_EVERY,
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "sides": [recoveries.to_dict() for recoveries in found],
        "steps": steps,
        "same_bytes": is_same,
    }
    print(json.dumps(record["sides"]), f"same bytes: {is_same}, after {steps} steps")
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
