"""What it brings FSDP2 on gloo to gather the next blocks' parameters ahead: 2 hosts and a link between them.

python benchmarks/suite/fsdp_prefetch.py --json benchmarks/suite/fsdp-prefetch.json

The hosts are network namespaces of this machine, so root and iproute2 are needed. Ways take turns in one run. Torch's
own prefetch is made for a GPU's streams: on gloo each gathering blocks, unless it is begun as an asynchronous call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.suite.shaped_hosts import run_on_hosts
from distributed.bench.machine import describe_machine, describe_versions

WIDTH, BLOCKS, BATCH, WARM = 512, 16, 96, 2
WAYS = {
    "torch's own": (0, False),
    "one block ahead": (1, False),
    "two blocks ahead": (2, False),
    "one block ahead, asynchronous": (1, True),
    "two blocks ahead, asynchronous": (2, True),
}


def make_model(ahead: int, is_asynchronous: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [fully_shard(block, mesh=mesh) for block in model]
    root = fully_shard(model, mesh=mesh)
    for place, block in enumerate(blocks):
        if ahead:
            assert isinstance(block, FSDPModule)
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, place - ahead) : place][::-1])
    if is_asynchronous:
        root._set_unshard_async_op(True)
    return model


def measure(rounds: int, result: Path) -> None:
    """On one rank."""
    dist.init_process_group("gloo")
    drawn = torch.Generator().manual_seed(dist.get_rank())
    x, target = torch.randn(BATCH, WIDTH, generator=drawn), torch.randint(0, WIDTH, (BATCH,), generator=drawn)
    models = {name: make_model(*way) for name, way in WAYS.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    losses: dict[str, float] = {}
    for number in range(WARM + rounds):
        for name in list(WAYS)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            loss = nn.functional.cross_entropy(models[name](x), target)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= WARM:
                seconds[name].append(float(took))
            losses[name] = loss.item()
    assert len(set(losses.values())) == 1, losses
    if dist.get_rank() == 0:
        result.write_text(json.dumps(seconds), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help="where the ranks write")
    parser.add_argument("--rank", action="store_true", help="this process is one")
    asked = parser.parse_args()
    folder = asked.folder or str(Path(os.environ.get("TMPDIR", "/tmp"), f"fsdp-prefetch-{os.getpid()}"))
    result = Path(folder, "result.json")
    if asked.rank:
        torch.set_num_threads(1)
        measure(asked.rounds, result)
        return
    before = os.getloadavg()[0]
    Path(folder).mkdir()
    arguments = ["--rounds", str(asked.rounds), "--folder", folder]
    run_on_hosts(Path(__file__), arguments, hosts=2, ranks_per_host=1, mbit_s=asked.mbit)
    seconds = json.loads(result.read_text())
    rows = {}
    for name, took in seconds.items():
        low, middle, high = statistics.quantiles(took, n=4)
        ratios = [mine / theirs for mine, theirs in zip(took, seconds["torch's own"], strict=True)]
        rows[name] = {"step_s": round(middle, 5), "low": round(low, 5), "high": round(high, 5)}
        rows[name]["over_own"] = round(statistics.median(ratios), 3)
        print(f"{name:32} {1e3 * middle:8.1f} ms a step, {rows[name]['over_own']:.2f} of torch's own")
    record = {
        "benchmark": "fsdp-prefetch",
        "unit": "seconds a step of the slower rank: median and quartiles; ratios are medians over the rounds",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "hosts": 2,
            "processes": 2,
            "mbit_s": asked.mbit,
            "rounds": asked.rounds,
            "blocks": BLOCKS,
            "width": WIDTH,
            "batch": BATCH,
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "ways": rows,
    }
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
