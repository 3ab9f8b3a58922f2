"""Throughput over 1..N processes through `Trainer.fit`: what another device brings.

Each size runs in a process of its own with one thread a rank: a CPU device is then a core, as a GPU is a GPU. Else the
one-process run would take all cores, and more processes could bring nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.core.env import inherited_environ
from distributed.core.errors import ConfigError, RankFailedError
from distributed.core.history import History
from distributed.core.run_dir import RunDir
from distributed.planner.hardware import Hardware, probe_hardware

BATCH = 32  # samples a device, weak; the global batch is this times the most processes under strong scaling
EPOCHS = 4  # the first warms up and is not counted

Notify = Callable[[str, int, int], None]  # (what is measured, done, in all)


@dataclass(frozen=True)
class ScalingPoint:
    """One number of processes."""

    processes: int
    samples_per_second: float
    speed_up: float  # against one process
    efficiency: float  # speed-up by process
    batch_per_device: int


@dataclass(frozen=True)
class Scaling:
    """What `distributed bench scaling` found."""

    sizes: tuple[ScalingPoint, ...]
    strong: bool
    steps: int  # an epoch
    repeats: int
    device: str
    devices: int  # cores, or GPUs
    load_before: float | None
    load_after: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "scaling",
            "kind": "strong: the global batch is fixed" if self.strong else "weak: the batch of a device is fixed",
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {
                "steps_per_epoch": self.steps,
                "counted_epochs": EPOCHS - 1,
                "repeats": self.repeats,
                "device": self.device,
            },
            "load_average": {"before": self.load_before, "after": self.load_after},
            "rows": [asdict(size) for size in self.sizes],
        }


def count_devices(hardware: Hardware) -> tuple[str, int]:
    """What a process gets to itself here, and how many of them there are."""
    return ("cuda", len(hardware.gpus)) if hardware.gpus else ("cpu", hardware.cpu_cores)


def measure_scaling(max_processes: int | None, *, steps: int, repeats: int, strong: bool, notify: Notify) -> Scaling:
    """Train the same model with 1..N processes, `repeats` times each, interleaved; the fastest of each counts."""
    device, devices = count_devices(probe_hardware())
    most = max_processes or devices
    numbers = [n for n in range(1, most + 1) if not strong or BATCH * most % n == 0]
    if device == "cuda" and most > devices:
        raise ConfigError(
            f"--max-processes {most}, but there are {devices} GPUs",
            why="two processes on one GPU measure each other",
            do=f"--max-processes {devices}",
        )
    load_before = load_average()
    throughputs = dict.fromkeys(numbers, 0.0)
    turns = numbers * repeats
    for done, number in enumerate(turns):
        notify(f"{number} process{'es' if number > 1 else ''}", done, len(turns))
        reached = _throughput(number, steps, _batch(number, most, strong))
        throughputs[number] = max(throughputs[number], reached)  # slower is what something else here took
    notify("done", len(turns), len(turns))
    sizes = summarize(throughputs, {n: _batch(n, most, strong) for n in numbers})
    return Scaling(
        sizes,
        strong=strong,
        steps=steps,
        repeats=repeats,
        device=device,
        devices=devices,
        load_before=load_before,
        load_after=load_average(),
    )


def summarize(throughputs: dict[int, float], batches: dict[int, int]) -> tuple[ScalingPoint, ...]:
    """
    >>> [size.efficiency for size in summarize({1: 100.0, 2: 180.0}, {1: 32, 2: 32})]
    [1.0, 0.9]
    """
    alone = throughputs[1]
    return tuple(
        ScalingPoint(number, speed, speed / alone, speed / alone / number, batches[number])
        for number, speed in throughputs.items()
    )


def _batch(processes: int, most: int, strong: bool) -> int:
    return BATCH * most // processes if strong else BATCH


def _throughput(processes: int, steps: int, batch: int) -> float:
    """Samples a second over all ranks, as History tells them, without the first epoch."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run_dir = os.path.join(folder, "run")
        command = [sys.executable, "-m", "distributed.bench.scaling.script"]
        command += [str(processes), str(steps), str(batch), str(EPOCHS), run_dir]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=inherited_environ() | threads, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RankFailedError(
                f"training with {processes} processes failed with exit code {ended.returncode}",
                why=(ended.stderr.strip().splitlines() or ["it said nothing"])[-1],
                traceback=ended.stderr,
                exit_code=ended.returncode,
            )
        history = History.load(RunDir(run_dir).history)
        return replace(history, epochs=history.epochs[1:]).throughput
