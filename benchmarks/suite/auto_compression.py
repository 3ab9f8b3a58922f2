"""compression="auto" and each kind against whole gradients, on two hosts whose link is shaped; needs root and Linux.

python benchmarks/suite/auto_compression.py --json benchmarks/suite/auto-compression.json

The hosts are network namespaces of this machine (`distributed.chaos.hosts`), a rank each; a token bucket on each
host's interface is the link. Bytes are those of the interface's counters. Steps are timed by their events, on rank 0.
Both hosts share this machine's cores, so only what waits for the link is like two machines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.chaos.hosts import Hosts

BANDWIDTHS = (100, 300, 1000, 4000)  # Mbit/s
KINDS = ("bf16", "int8", "powersgd", "topk")
WARM = 3  # steps that are not timed
TAKEN = 24  # steps after which auto has chosen, and compared
TARGET = 1.01  # of the dense run's loss
FACTOR = 1.25  # times the dense run's steps that a compressed one may take
SMOOTHED = 10  # steps of a mean loss
PORT = "29541"
CLASSES, INPUTS = 16, 256


class Convolutions(nn.Module):
    """Much to compute for each number of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 64, 3, padding=1), nn.ReLU()),
            *(nn.AvgPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten()),
            nn.Linear(128, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.view(-1, 1, 16, 16))
        return found


def mlp(width: int) -> nn.Module:
    sizes = (INPUTS, width, width, width)
    hidden = [(nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*(layer for layers in hidden for layer in layers), nn.Linear(width, CLASSES))


MODELS = {"mlp-1m": lambda: mlp(620), "conv-0.1m": Convolutions, "mlp-10m": lambda: mlp(2120)}


def data(samples: int = 16384) -> TensorDataset:
    """Clusters, of which three in ten samples have the name of any."""
    generator = torch.Generator().manual_seed(1)
    centers, y = torch.randn(CLASSES, INPUTS, generator=generator), torch.arange(samples) % CLASSES
    x = centers[y] / 4 + torch.randn(samples, INPUTS, generator=generator)
    others = torch.randint(CLASSES, (samples,), generator=generator)
    return TensorDataset(x, torch.where(torch.rand(samples, generator=generator) < 0.3, others, y))


def sent_bytes() -> int:
    """By the counter of this host's interface."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[8])


def shape(mbit: int) -> None:
    """This host's link."""
    burst = max(131072, mbit * 1_000_000 // 8 // 250)
    limits = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limits], check=True)


def fit(model: str, kind: str, steps: int, *, batch: int = 16, rate: float = 0.05) -> dict[str, Any]:
    """One run: when each step had ended, its loss, and what was said."""
    torch.manual_seed(0)
    module = MODELS[model]()
    before = sent_bytes()
    trainer = Trainer(
        module,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(module.parameters(), rate),
        compression=kind,
        batch_size=batch,
        epochs=100,
        max_steps=steps,
        log_every_n_steps=1,
        progress=False,
        check_replicas=False,
        run_dir=tempfile.mkdtemp(),
    )
    begun, worked = time.time(), time.process_time()
    history = trainer.fit(data())
    cpu_s = (time.process_time() - worked) / steps
    found: dict[str, Any] = {"sent_bytes": sent_bytes() - before, "cpu_s": cpu_s, "ended": [], "loss": [], "said": []}
    if os.environ["RANK"] == "0":
        for line in Path(history.run_dir, "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "StepEnded":
                found["ended"].append(event["time"] - begun)
                found["loss"].append(event["loss"])
            elif event["event"] == "Warned" and "compression" in event["message"]:
                found["said"].append(event["message"])
        found["switches"] = read_switches(Path(history.run_dir, "compression.json"))
    return found


def read_switches(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["switches"] if path.exists() else []


def step_s(found: dict[str, Any], first: int = WARM) -> float:
    ended = found["ended"][first:]
    return statistics.median(b - a for a, b in pairwise(ended))


def one_case(model: str, mbit: int, kinds: Sequence[str], steps: int) -> dict[str, Any]:
    """Whole gradients before and after the others, as the machine is not alone."""
    shape(mbit)
    runs = {"none": fit(model, "none", steps)}
    runs |= {kind: fit(model, kind, TAKEN + steps if kind == "auto" else steps) for kind in kinds}
    again = fit(model, "none", steps)
    if not again["ended"]:
        return {}
    whole = [step_s(runs.pop("none")), step_s(again)]
    row: dict[str, Any] = {"model": model, "mbit_per_s": mbit, "none": {"step_s": whole}}
    for kind, found in runs.items():
        last = TAKEN if kind == "auto" else WARM
        row[kind] = {"step_s": step_s(found, last), "sent_bytes": found["sent_bytes"], "cpu_s": found["cpu_s"]}
        if kind == "auto":
            row[kind] |= {"said": found["said"], "switches": found["switches"], "first_steps_s": found["ended"][TAKEN]}
    row["none"] |= {"sent_bytes": again["sent_bytes"], "cpu_s": again["cpu_s"]}
    print(json.dumps(row), flush=True)
    return row


def sends(kind: str, found: dict[str, Any], steps: int) -> None:
    """To the screen, as it comes."""
    if found["ended"]:
        print(f"{kind}: {found['ended'][-1]:.1f} s for {steps} steps, loss {found['loss'][-1]:.3f}", flush=True)


def to_loss(kinds: Sequence[str], steps: int, model: str = "mlp-10m") -> list[dict[str, Any]]:
    """How long each kind takes to the loss of a dense run of that many steps."""
    shape(100)
    dense, rows = fit(model, "none", steps), list[dict[str, Any]]()
    sends("none", dense, steps)
    target = TARGET * statistics.fmean(dense["loss"][-SMOOTHED:]) if dense["loss"] else 0.0
    for kind in kinds:
        found = fit(model, kind, int(FACTOR * steps))
        sends(kind, found, int(FACTOR * steps))
        loss, ended = found["loss"], found["ended"]
        means = [statistics.fmean(loss[at - SMOOTHED : at]) for at in range(SMOOTHED, len(loss) + 1)]
        at = next((at for at, mean in enumerate(means, SMOOTHED - 1) if mean <= target), None)
        took = None if at is None else ended[at]
        rows.append(
            {
                "kind": kind,
                "step_s": step_s(found, TAKEN if kind == "auto" else WARM) if ended else None,
                "steps": None if at is None else at + 1,
                "seconds": took,
                "times_sooner": None if took is None or not dense["ended"] else dense["ended"][-1] / took,
                "sent_bytes_a_step": found["sent_bytes"] / (int(FACTOR * steps)),
                "cpu_s": found["cpu_s"],
                "said": found["said"],
            }
        )
    whole: dict[str, Any] = {
        "kind": "none",
        "steps": steps,
        "target": target,
        "sent_bytes_a_step": dense["sent_bytes"] / steps,
    }
    if dense["ended"]:
        whole |= {"seconds": dense["ended"][-1], "step_s": step_s(dense), "cpu_s": dense["cpu_s"]}
    return [whole, *rows]


def work(asked: argparse.Namespace) -> None:
    """One rank, on its host."""
    torch.set_num_threads(1)
    out = Path(asked.work)
    record: dict[str, Any] = {"cases": [], "to_loss": []}
    for part in asked.parts.split(","):
        if part == "cases":
            for model in asked.model or MODELS:
                for mbit in asked.mbit or BANDWIDTHS:
                    record["cases"].append(one_case(model, mbit, ("auto", *KINDS), asked.steps))
                    save(out, record)
        elif part == "loss":
            record["to_loss"] = to_loss(("powersgd", "topk", "auto"), asked.loss_steps)
            save(out, record)
    save(out, record)


def save(out: Path, record: dict[str, Any]) -> None:
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(record, indent=1) + "\n")


SAID = re.compile(r"above ([\d.,]+) Mbit/s whole gradients are faster than those of (\w+)")


def crossovers(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a kind's steps and those with whole gradients take equally long, between two bandwidths, and as said."""
    rows = []
    for model in MODELS:
        of_model = [case for case in cases if case["model"] == model]
        said = [match for case in of_model for text in case["auto"]["said"] for match in SAID.findall(text)]
        for kind in KINDS:
            ratios = [
                (math.log(case["mbit_per_s"]), math.log(case[kind]["step_s"] / min(case["none"]["step_s"])))
                for case in of_model
            ]
            predicted = [float(rate.replace(",", "")) for rate, of in said if of == kind]
            for (x, low), (y, high) in pairwise(ratios):
                if low < 0 <= high:
                    measured = math.exp(x + (y - x) * -low / (high - low))
                    rows.append({"model": model, "kind": kind, "mbit_per_s": measured, "predicted": predicted})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of a run with one kind")
    parser.add_argument("--loss-steps", type=int, default=60, help="steps of the dense run whose loss is to be reached")
    parser.add_argument("--parts", default="cases,loss", help="of the other part, the file keeps its rows")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--mbit", action="append", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked)
        return
    before = os.getloadavg()[0]
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        out, ranks = Path(folder, "found.json"), list[subprocess.Popen[bytes]]()
        for rank in range(2):
            environ = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environ |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--work", str(out)]
            ranks.append(subprocess.Popen(hosts[rank].command(command), env=environ))
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        found = json.loads(out.read_text())
    kept = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    found = {part: rows or kept.get(part, []) for part, rows in found.items()}
    record = {
        "benchmark": "auto-compression",
        "unit": "seconds a step; seconds until the mean loss of 10 steps is within 1 % of a dense run's last ones",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "hosts": "2 network namespaces, a rank of 1 thread each, tbf on both interfaces",
            "batch": "16 a rank",
            "models": {name: sum(p.numel() for p in make().parameters()) for name, make in MODELS.items()},
            "steps": asked.steps,
            "loss_steps": asked.loss_steps,
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "crossovers": crossovers(found["cases"]),
        **found,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
