"""What a way of training a GPT costs on one device, in time and memory, beside a bare compiled loop in the same run.

The bare loop and ours are interleaved, so that both see the same clocks and heat; the others follow one by one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from distributed.bench.machine import PEAK_FLOPS, describe_machine, describe_versions
from distributed.bench.workloads.gpt import SIZES, Gpt, GptSize, flops_per_token
from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.data.loading.loader import Microbatch
from distributed.planner.hardware import probe_hardware
from distributed.planner.planning import JobProfile, make_plan
from distributed.runtime.session import Session
from distributed.runtime.world import leave_world
from distributed.strategies.torch_mesh import TorchMesh
from distributed.train.task import Task

Notify = Callable[[str, int, int], None]
Step = Callable[[], Any]
TARGET = 1.01  # of the bare loop's time
_WARM = 4

BARE = "bare loop, compiled"
OURS = "ours, compiled by the user"
WAYS: dict[str, dict[str, Any]] = {
    OURS: {},
    "ours, compile=true": {"compile": True},
    "ours, not compiled": {},
    "activation checkpointing": {"compile": True, "activation_checkpointing": True},
    "each second block": {"compile": True, "activation_checkpointing": 2},
    "selective": {"compile": True, "activation_checkpointing": "selective"},
    "cpu_offload": {"backend": "fsdp", "cpu_offload": True},
}


@dataclass(frozen=True)
class Way:
    name: str
    step_ms: float
    spread_ms: float
    ratio: float  # to the bare loop
    peak_gib: float | None
    loss: float


@dataclass(frozen=True)
class StrategyCosts:
    device: str
    size: str
    parameters: int
    tokens: int  # a step
    precision: str
    rows: tuple[Way, ...]
    flops_per_token: float

    def to_dict(self) -> dict[str, Any]:
        return {"machine": describe_machine(), "versions": describe_versions(), **asdict(self)}

    def part_of_peak(self, way: Way) -> float | None:
        """Of what the device could do in dense bf16; None where that is not known."""
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in self.device), None)
        return None if peak is None else self.flops_per_token * self.tokens / (way.step_ms / 1e3) / peak


def measure_strategies(size_name: str, *, steps: int, rounds: int, notify: Notify) -> StrategyCosts:
    size = SIZES[size_name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ways = {name: how for name, how in WAYS.items() if device.type == "cuda" or "compile" not in how}
    notify(f"{BARE} and {OURS}", 0, len(ways))
    contenders = {BARE: _bare(size, device), OURS: _ours(size, device, {}, compiled=True)}
    times, losses, peaks = _measure(contenders, device, steps, rounds)
    contenders.clear()
    for number, (name, how) in enumerate(ways.items()):
        if name != OURS:
            notify(name, number, len(ways))
            _free(device)
            found = _measure({name: _ours(size, device, how)}, device, steps, max(1, rounds // 2), alone=True)
            for mine, theirs in zip((times, losses, peaks), found, strict=True):
                mine.update(theirs)  # type: ignore[attr-defined]
            leave_world()
    bare = statistics.median(times[BARE])
    rows = [
        Way(name, 1e3 * statistics.median(t), 1e3 * _spread(t), statistics.median(t) / bare, peaks[name], losses[name])
        for name, t in times.items()
    ]
    with torch.device("meta"):
        model = Gpt(size)
    return StrategyCosts(
        torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        size_name,
        sum(p.numel() for p in model.parameters()),
        size.batch * size.length,
        "fp32 parameters, bf16 autocast",
        tuple(rows),
        flops_per_token(model, size),
    )


def _measure(
    contenders: dict[str, Step], device: torch.device, steps: int, rounds: int, *, alone: bool = False
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, float | None]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    peaks: dict[str, float | None] = dict.fromkeys(contenders)
    for step in contenders.values():
        for _ in range(_WARM):
            step()
    for _ in range(rounds):
        for name, step in contenders.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            for _ in range(steps):
                loss = step()
            losses[name] = float(loss)  # waits for the device
            times[name].append((time.perf_counter() - begun) / steps)
            if device.type == "cuda" and alone:
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    return times, losses, peaks


def _batch(size: GptSize, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, size.vocabulary, (size.batch, size.length), generator=torch.Generator().manual_seed(1))
    return ids.to(device), ids.roll(-1, 1).to(device)


def _make(size: GptSize, device: torch.device) -> Gpt:
    torch.manual_seed(0)
    with device:
        return Gpt(size)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=parameters[0].device.type == "cuda")


def _bare(size: GptSize, device: torch.device) -> Step:
    model = _make(size, device)
    if device.type == "cuda":
        model.compile()
    optimizer = _adamw(model.parameters())
    ids, labels = _batch(size, device)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: torch.Tensor = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _ours(size: GptSize, device: torch.device, how: dict[str, Any], *, compiled: bool = False) -> Step:
    """One step of the strategy that a run of one rank has."""
    settings = {"batch_size": size.batch, "mixed_precision": "bf16", "num_gpus": 1, "device": device.type, **how}
    config = DistributedConfig(**settings)
    env = WorkerEnv()
    plan = make_plan(config, JobProfile(samples=size.batch), probe_hardware(), run_dir="unused", world=env)
    session = Session.open(env, device=plan.device, collectives=plan.collectives, timeout_s=60)
    model = _make(size, device)
    if compiled and device.type == "cuda":
        model.compile()
    strategy = TorchMesh(plan)
    strategy.setup(Task(model, optimizer=_adamw), session)
    ids, labels = _batch(size, device)
    microbatch = [Microbatch({"ids": ids, "labels": labels}, 1.0, size.batch)]
    return lambda: strategy.train_step(microbatch).loss


def _spread(times: list[float]) -> float:
    return statistics.stdev(times) if len(times) > 1 else 0.0


def _free(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
