"""What sending costs between the processes of one machine: four collectives over sizes, in latency and bandwidth."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from distributed.bench.interleave import WaitingRanks
from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.core.choices import Device
from distributed.planner.hardware import probe_hardware

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
SMALLEST = 2**10
_FACTOR = 4  # from a size to the next
_MOST_CALLS, _FEWEST_CALLS, _BYTES_A_TURN = 50, 3, 2**24

Notify = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sent:
    """One operation with one size: medians over the rounds, with quartiles of the latency."""

    operation: str
    size_bytes: int  # the whole message, as every rank has it before or after
    latency_us: float
    low_us: float
    high_us: float
    bus_gb_s: float  # 10⁹ bytes a second that each link carries


@dataclass(frozen=True)
class Collectives:
    rows: tuple[Sent, ...]
    backend: str
    processes: int
    rounds: int
    missing: dict[str, str]
    load_before: float | None
    load_after: float | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "collectives",
            "unit": "microseconds a call of rank 0; 10^9 bytes a second on each link",
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"backend": self.backend, "processes": self.processes, "rounds": self.rounds},
            "load_average": {"before": self.load_before, "after": self.load_after},
            "missing": self.missing,
            "rows": [asdict(row) for row in self.rows],
        }


def bus_part(operation: str, ranks: int) -> float:
    """How often each link carries a message's bytes, at the least: what makes operations comparable.

    >>> bus_part("all-reduce", 2), bus_part("all-gather", 4), bus_part("broadcast", 4)
    (1.0, 0.75, 1.0)
    """
    if operation == "broadcast":
        return 1.0
    return (2.0 if operation == "all-reduce" else 1.0) * (ranks - 1) / ranks


def measure_collectives(processes: int | None, *, largest_mib: float, rounds: int, notify: Notify) -> Collectives:
    """All sizes of all operations in each round, interleaved."""
    gpus = len(probe_hardware().gpus)
    ranks = processes or max(2, gpus)
    device: Device = "cuda" if gpus >= ranks else "cpu"
    turns = [(operation, size) for size in _sizes(int(largest_mib * 2**20)) for operation in OPERATIONS]
    load_before = load_average()
    taken: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    missing: dict[str, str] = {}
    in_all = len(turns) * (rounds + 1)
    command = ("distributed.bench.collectives.rank", device)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        with WaitingRanks("collectives", ranks=ranks, command=command, folder=folder, device=device) as waiting:
            notify("starting", 0, in_all)
            waiting.connect()
            for number in range(-1, rounds):  # the first is a rehearsal: connections, first calls
                for place, (operation, size) in enumerate(turns):
                    notify(f"{operation} of {size} bytes", (number + 1) * len(turns) + place, in_all)
                    if operation in missing:
                        continue
                    calls = 1 if number < 0 else max(_FEWEST_CALLS, min(_MOST_CALLS, _BYTES_A_TURN // size))
                    answer = waiting.ask({"operation": operation, "size": size, "calls": calls})[0]
                    if "failed" in answer:
                        missing[operation] = answer["failed"]
                    elif number >= 0:
                        taken[operation, size].append(answer["seconds"])
    rows = tuple(summarize(*turn, ranks, seconds) for turn, seconds in taken.items() if seconds)
    backend = "nccl" if device == "cuda" else "gloo"
    return Collectives(
        rows,
        backend=backend,
        processes=ranks,
        rounds=rounds,
        missing=missing,
        load_before=load_before,
        load_after=load_average(),
    )


def summarize(operation: str, size: int, ranks: int, seconds: list[float]) -> Sent:
    """
    >>> summarize("all-reduce", 4000, 4, [1e-6, 2e-6, 3e-6]).bus_gb_s
    3.0
    """
    middle = median(seconds)
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (middle, middle, middle)
    bandwidth = size * bus_part(operation, ranks) / middle / 1e9
    return Sent(operation, size, middle * 1e6, low * 1e6, high * 1e6, round(bandwidth, 6))


def _sizes(largest: int) -> list[int]:
    """
    >>> _sizes(2**16)
    [1024, 4096, 16384, 65536]
    """
    sizes = [SMALLEST]
    while sizes[-1] * _FACTOR <= largest:
        sizes.append(sizes[-1] * _FACTOR)
    return sizes
