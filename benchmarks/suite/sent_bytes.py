"""Bytes that a rank sends in a step of a small GPT: DDP and FSDP in several precisions, ours and loops by hand.

python benchmarks/suite/sent_bytes.py --json benchmarks/suite/sent-bytes-h200.json

The collectives are those of torch's flight recorder, with the sizes and types that it wrote down; a rank sends of
them what a ring sends, which is the least. A graph replays what it recorded when it was made, so that bytes are counted
in steps as written. The clock is that of the thread that launches, in groups of steps that fit into CUDA's queue.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.bench.machine import describe_machine, describe_versions
from distributed.bench.workloads.gpt import Gpt, GptSize
from distributed.runtime.torch_compat import dump_nccl_trace, dump_trace_json
from distributed.strategies.replicated import Replicated
from distributed.strategies.sharded import Sharded
from distributed.testing import run_ranks
from distributed.train.capture.capture import StepCapture

SIZES = {"cuda": GptSize(4, 256, 4, 256, 8, 4096), "cpu": GptSize(2, 64, 2, 32, 4, 256)}
GROUP, GROUPS = 2, 12  # steps that are timed together; groups
WARM, WARM_CAPTURED = 24, 160  # steps before the first that is timed
RECORDED = "8192"  # collectives that torch keeps, of all steps that are counted
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
TYPES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2}  # bytes
TYPES |= dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1)
FSDP: dict[str, Any] = {"backend": "fsdp", "sharding": "full"}


@dataclass(frozen=True)
class Way:
    settings: Mapping[str, Any] = field(default_factory=dict)  # of our Trainer
    by_hand: Callable[[nn.Module], nn.Module] | None = None  # instead of it

    @property
    def is_captured(self) -> bool:
        return bool(self.settings.get("capture"))

    @property
    def warm(self) -> int:
        return WARM_CAPTURED if self.is_captured else WARM

    @property
    def steps(self) -> int:
        return self.warm + GROUP * (GROUPS + 1) + 1


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: nn.Module) -> nn.Module:
    assert isinstance(model, Gpt)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WAYS = {
    "bare DDP": Way(by_hand=replicated),
    "ddp": Way(),
    "ddp captured": Way({"capture": True}),
    "bare FSDP": Way(by_hand=sharded),
    "fsdp": Way(FSDP),
    "fsdp, mixed_precision=bf16": Way(FSDP | {"mixed_precision": "bf16"}),
    "fsdp, bf16_parameters=compensated": Way(FSDP | {"mixed_precision": "bf16", "bf16_parameters": "compensated"}),
    "fsdp, bf16_parameters=stochastic": Way(FSDP | {"mixed_precision": "bf16", "bf16_parameters": "stochastic"}),
}


class Clock:
    """`tick` comes before every step: the host's time of each group, what the last one launched, and what was sent."""

    def __init__(self, way: Way, device: str) -> None:
        self.groups: list[float] = []
        self.launched: Counter[str] = Counter()
        self.collectives: list[dict[str, Any]] = []  # of the timed steps
        self._way, self._is_gpu = way, device == "cuda"
        self._step, self._begun, self._first = 0, 0.0, 0.0
        self._profile: profile | None = None

    def tick(self) -> None:
        now, done = time.perf_counter(), self._step - self._way.warm
        self._step += 1
        if done < 0 or done % GROUP:
            return
        number = done // GROUP
        if self._is_gpu:
            torch.cuda.synchronize()
        if 0 < number <= GROUPS:
            self.groups.append((now - self._begun) / GROUP)
        if number == 0:
            self._first = time.time_ns()
        elif number == GROUPS:
            self.collectives = [entry for entry in read_recorders() if entry["time_created_ns"] >= self._first]
            self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._is_gpu])
            self._profile.start()
        elif number == GROUPS + 1 and self._profile is not None:
            self._profile.stop()
            found = self._profile.key_averages()
            self.launched = Counter({event.key: event.count for event in found if event.key in LAUNCHES})
            self._profile = None
        self._begun = time.perf_counter()


def read_recorders() -> Iterator[dict[str, Any]]:
    """The collectives that torch has written down, on NCCL and on gloo."""
    nccl, gloo = dump_nccl_trace(includeStackTraces=False, onlyActive=False), None
    with suppress(RuntimeError, TypeError, ValueError):  # this process has no group on gloo
        gloo = dump_trace_json()
    for told in (pickle.loads(nccl) if nccl else {}, json.loads(gloo) if gloo else {}):
        yield from told.get("entries", ())


def kind_of(profiling_name: str) -> str:
    """
    >>> kind_of("nccl:_all_gather_base"), kind_of("nccl:_reduce_scatter_base"), kind_of("gloo:all_reduce")
    ('all_gather', 'reduce_scatter', 'all_reduce')
    """
    name = profiling_name.partition(":")[2].strip("_").removesuffix("_base")
    return name.replace("allreduce", "all_reduce").replace("allgather", "all_gather").partition(" ")[0]


def sent(kind: str, size: int, ranks: int) -> float:
    """Bytes that a rank of a ring sends for `size` bytes of input.

    >>> sent("all_reduce", 8, 2), sent("all_gather", 8, 4), sent("reduce_scatter", 8, 2)
    (8.0, 24, 4.0)
    """
    part = (ranks - 1) / ranks
    if kind.startswith("all_gather"):
        return size * (ranks - 1)
    if kind.startswith(("reduce_scatter", "all_to_all")):
        return size * part
    return 2 * size * part if kind.startswith("all_reduce") else size


def count(entries: Iterable[Mapping[str, Any]], ranks: int, steps: int) -> dict[str, dict[str, float]]:
    """By library, operation and type: calls, bytes of their inputs, and what a rank sends, a step."""
    found: dict[str, dict[str, float]] = {}
    for entry in entries:
        kind = kind_of(entry["profiling_name"])
        for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=True):
            library = entry["profiling_name"].partition(":")[0]
            row = found.setdefault(f"{library} {kind} {dtype}", {"calls": 0.0, "input_bytes": 0.0, "sent_bytes": 0.0})
            size = prod(shape) * TYPES[dtype]
            row["calls"] += 1 / steps
            row["input_bytes"] += size / steps
            row["sent_bytes"] += sent(kind, size, ranks) / steps
    return {name: {key: round(value, 3) for key, value in row.items()} for name, row in sorted(found.items())}


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(SIZES[device])


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def make_rows(way: Way, device: str) -> TensorDataset:
    """The labels twice, as the model takes them and the last is the target."""
    size, drawn = SIZES[device], torch.Generator().manual_seed(0)
    samples = way.steps * size.batch * dist.get_world_size()
    ids = torch.randint(size.vocabulary, (samples, size.length + 1), generator=drawn)
    return TensorDataset(ids[:, :-1], ids[:, 1:], ids[:, 1:])


def train_by_hand(way: Way, device: str) -> Clock:
    assert way.by_hand is not None
    clock, model = Clock(way, device), way.by_hand(make_model(device).to(device))
    optimizer, rank, ranks = make_optimizer(model.parameters()), dist.get_rank(), dist.get_world_size()
    ids, labels = (part.to(device).split(SIZES[device].batch) for part in make_rows(way, device).tensors[:2])
    for step in range(way.steps):
        clock.tick()
        optimizer.zero_grad()
        model(ids[step * ranks + rank], labels[step * ranks + rank]).backward()
        optimizer.step()
    return clock


def train_ours(way: Way, device: str, folder: str) -> Clock:
    clock = Clock(way, device)
    kind: Any = StepCapture if way.is_captured else Sharded if way.settings else Replicated
    plain = kind.train_step

    def timed(self: Any, *args: Any, **options: Any) -> Any:
        clock.tick()
        return plain(self, *args, **options)

    kind.train_step = timed
    try:
        trainer = Trainer(
            make_model(device),
            optimizer=make_optimizer,
            batch_size=SIZES[device].batch,
            progress=False,
            share_gpus=device == "cuda",
            device=device,
            log_every_n_steps=1000,  # no step that is counted
            run_dir=folder,
            **{"capture": False, **way.settings},
        )
        trainer.fit(make_rows(way, device))
    finally:
        kind.train_step = plain
    return clock


def measure(names: list[str], device: str, folder: str) -> dict[str, Clock]:
    """What this rank found of each way, one after the other."""
    found = {}
    for number, name in enumerate(names):
        way = WAYS[name]
        by_hand = way.by_hand is not None
        found[name] = train_by_hand(way, device) if by_hand else train_ours(way, device, f"{folder}/{number}")
        if dist.get_rank() == 0:
            print(f"{name}: done", flush=True)
    return found


def row(name: str, ranks: list[dict[str, Clock]], parameters: int) -> dict[str, Any]:
    by_rank = [[1e6 * group for group in rank[name].groups] for rank in ranks]
    low, middle, high = statistics.quantiles(max(by_rank, key=statistics.median), n=4)
    launched = {call: number / GROUP for call, number in ranks[0][name].launched.items()}
    found: dict[str, Any] = {"host_us_a_step": round(middle, 1), "low": round(low, 1), "high": round(high, 1)}
    found["launches_a_step"] = launched
    if not WAYS[name].is_captured:
        collectives = count(ranks[0][name].collectives, len(ranks), GROUP * GROUPS)
        in_all = round(sum(found["sent_bytes"] for found in collectives.values()), 3)
        found |= {"sent_bytes_a_step": in_all, "sent_bytes_a_parameter": round(in_all / parameters, 4)}
        found["collectives_a_step"] = collectives
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", action="append", choices=WAYS, help="may be repeated")
    parser.add_argument("--device", default="cuda", choices=SIZES)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before, device = os.getloadavg()[0], asked.device
    names = [name for name in asked.only or WAYS if device == "cuda" or not WAYS[name].is_captured]
    os.environ["TORCH_FR_BUFFER_SIZE"] = RECORDED  # read by torch in the ranks
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"sent-bytes-{os.getpid()}")
    ranks = run_ranks(measure, asked.ranks, names, device, str(folder), device=device)
    parameters = sum(parameter.numel() for parameter in make_model(device).parameters())
    rows = {name: row(name, ranks, parameters) for name in names}
    for name, found in rows.items():
        bytes_ = f"{found['sent_bytes_a_step']:12,.0f} bytes" if "sent_bytes_a_step" in found else " " * 18
        launches = f"{sum(found['launches_a_step'].values()):.0f} launches"
        print(f"{name:34} {bytes_} {found['host_us_a_step']:8.1f} us of the host {launches} a step")
    record = {
        "benchmark": "sent-bytes",
        "unit": "bytes that a rank of a ring sends a step; microseconds of the launching thread, of the slower rank: "
        "median and quartiles of groups",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "processes": asked.ranks,
            "device": device,
            "gpus": torch.cuda.device_count(),
            "steps": GROUP * GROUPS,
            "group": GROUP,
            "model": "GPT of {0.blocks} blocks of {0.width}, vocabulary {0.vocabulary}".format(SIZES[device]),
            "parameters": parameters,
            "batch": SIZES[device].batch,
            "length": SIZES[device].length,
        },
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "ways": rows,
    }
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
