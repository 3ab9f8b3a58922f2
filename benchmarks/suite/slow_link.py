"""All-reduces of 2 hosts with 2 ranks each over a slow link: gloo's, our ring, and the one of two levels, in turns.

python benchmarks/suite/slow_link.py --json benchmarks/suite/slow-link.json

The hosts are network namespaces of this machine, so root and iproute2 are needed; within a host ranks meet on the same
interface, whose own traffic never reaches the shaped link. What each host sends is read from the interface's counters.
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

from benchmarks.suite.shaped_hosts import run_on_hosts
from distributed import comm
from distributed.bench.machine import describe_machine, describe_versions

ALGORITHMS = ("backend", "ring", "two_level")
SIZES = (2**20, 2**22, 2**24)  # bytes
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measure(rounds: int, folder: str) -> None:
    """On one rank."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: list[dict[str, Any]] = []
    for size in SIZES:
        seconds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
        sent: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
        for number in range(rounds + 1):  # the first makes connections, and is not counted
            for name in ALGORITHMS[:: 1 if number % 2 else -1]:
                tensor = torch.full((size // 4,), float(rank + 1))
                dist.barrier()
                before, begun = int(_SENT.read_text()), time.perf_counter()
                comm.all_reduce(tensor, name=f"{name} of {size}", algorithm=name)
                took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
                assert torch.equal(tensor, torch.full_like(tensor, ranks * (ranks + 1) / 2)), f"{name} of {size}"
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if number:
                    seconds[name].append(float(took))
                    sent[name].append((int(_SENT.read_text()) - before) / size)
        for name in ALGORITHMS:
            ratios = [mine / flat for mine, flat in zip(seconds[name], seconds["backend"], strict=True)]
            low, middle, high = statistics.quantiles(seconds[name], n=4)
            row = {"bytes": size, "algorithm": name, "seconds": round(middle, 5), "low": round(low, 5)}
            row |= {"high": round(high, 5), "over_backend": round(statistics.median(ratios), 3)}
            found.append(row | {"sent_by_host_over_size": round(statistics.median(sent[name]), 3)})
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help="where the ranks write")
    parser.add_argument("--rank", action="store_true", help="this process is one")
    asked = parser.parse_args()
    folder = asked.folder or str(Path(os.environ.get("TMPDIR", "/tmp"), f"slow-link-{os.getpid()}"))
    if asked.rank:
        measure(asked.rounds, folder)
        return
    before = os.getloadavg()[0]
    Path(folder).mkdir()
    arguments = ["--rounds", str(asked.rounds), "--folder", folder]
    run_on_hosts(Path(__file__), arguments, hosts=2, ranks_per_host=2, mbit_s=asked.mbit)
    rows = json.loads(Path(folder, "result.json").read_text())
    for row in rows:
        ratio, sent = row["over_backend"], row["sent_by_host_over_size"]
        print(
            f"{row['bytes']:>10} B {row['algorithm']:>10} {1e3 * row['seconds']:9.1f} ms {ratio:5.2f} of gloo's, "
            f"a host sends {sent:.2f} × the tensor"
        )
    record = {
        "benchmark": "slow-link",
        "unit": "seconds of the slowest rank: median and quartiles; ratios are medians over the rounds",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"hosts": 2, "processes": 4, "mbit_s": asked.mbit, "rounds": asked.rounds},
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "rows": rows,
    }
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
