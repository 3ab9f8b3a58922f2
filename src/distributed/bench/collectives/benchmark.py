"""What sending costs between processes: collectives over sizes, by operation, backend and algorithm."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from distributed.bench.interleave import WaitingRanks
from distributed.bench.machine import describe_machine, describe_versions, load_average
from distributed.bench.pictures import operation_name
from distributed.core.choices import Collectives, Device
from distributed.core.errors import ConfigError, PlanError
from distributed.planner.hardware import probe_hardware

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
MORE_OPERATIONS = ("reduce", "gather", "scatter", "all-to-all", "send-recv")
ALGORITHMS = ("backend", "ring", "doubling", "tree", "two_level", "auto")  # of an all-reduce
SMALLEST, LARGEST, FACTOR = 2**10, 2**26, 4
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
    alg_gb_s: float = 0.0  # of the message, by the time
    count: int = 0  # float32 numbers
    wrong: int = 0  # of the numbers that came out on all ranks
    algorithm: str = "backend"

    @property
    def name(self) -> str:
        return operation_name(asdict(self))

    @property
    def redop(self) -> str:
        return "sum" if "reduce" in self.operation else "none"


@dataclass(frozen=True)
class CollectiveTimes:
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
    if operation in ("broadcast", "reduce", "send-recv"):
        return 1.0
    return (2.0 if operation == "all-reduce" else 1.0) * (ranks - 1) / ranks


def measure_collectives(
    processes: int | None,
    *,
    sizes: Sequence[int],
    rounds: int,
    notify: Notify,
    operations: Sequence[str] = OPERATIONS,
    algorithms: Sequence[str] = ("backend",),
    backend: Collectives | None = None,
    iterations: int | None = None,
) -> CollectiveTimes:
    """All sizes of all operations in each round, interleaved."""
    ranks, device = place_ranks(processes, backend)
    _check_sizes(sizes, ranks)
    ways = [(o, a) for o in operations for a in (algorithms if o == "all-reduce" else ("backend",))]
    turns = [(*way, size) for size in sizes for way in ways]
    load_before = load_average()
    taken: dict[tuple[str, str, int], list[float]] = {turn: [] for turn in turns}
    wrong = dict.fromkeys(turns, 0)
    missing: dict[str, str] = {}
    in_all = len(turns) * (rounds + 1)
    with waiting_ranks(ranks, device) as waiting:
        notify("starting", 0, in_all)
        waiting.connect()
        for number in range(-1, rounds):  # the first is a rehearsal: connections, first calls
            for place, turn in enumerate(turns):
                operation, algorithm, size = turn
                name = operation_name({"operation": operation, "algorithm": algorithm})
                notify(f"{name} of {size} bytes", (number + 1) * len(turns) + place, in_all)
                if name in missing:
                    continue
                calls = 1 if number < 0 else iterations or calls_of(size)
                asked = {"operation": operation, "size": size, "calls": calls, "algorithm": algorithm}
                answers = waiting.ask(asked)
                if "failed" in answers[0]:
                    missing[name] = answers[0]["failed"]
                elif number >= 0:
                    taken[turn].append(answers[0]["seconds"])
                    wrong[turn] = max(wrong[turn], sum(answer["wrong"] for answer in answers))
    rows = tuple(
        summarize(operation, size, ranks, seconds, algorithm=algorithm, wrong=wrong[operation, algorithm, size])
        for (operation, algorithm, size), seconds in taken.items()
        if seconds
    )
    return CollectiveTimes(
        rows,
        backend="nccl" if device == "cuda" else "gloo",
        processes=ranks,
        rounds=rounds,
        missing=missing,
        load_before=load_before,
        load_after=load_average(),
    )


def place_ranks(processes: int | None, backend: Collectives | None) -> tuple[int, Device]:
    """How many there are, and on what; a backend that is asked for says which."""
    gpus = len(probe_hardware().gpus)
    ranks = processes or max(2, gpus)
    if backend == "nccl" and gpus < ranks:
        raise PlanError(
            f"--backend nccl with {ranks} processes",
            why=f"NCCL sends between GPUs, and this machine has {gpus}",
            do="--backend gloo, or fewer --processes",
        )
    return ranks, "cuda" if gpus >= ranks and backend != "gloo" else "cpu"


@contextmanager
def waiting_ranks(ranks: int, device: Device) -> Iterator[WaitingRanks]:
    """They end with the context."""
    command = ("distributed.bench.collectives.rank", device)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        with WaitingRanks("collectives", ranks=ranks, command=command, folder=folder, device=device) as waiting:
            yield waiting


def calls_of(size: int) -> int:
    """How many make a turn."""
    return max(_FEWEST_CALLS, min(_MOST_CALLS, _BYTES_A_TURN // size))


def summarize(
    operation: str, size: int, ranks: int, seconds: list[float], *, algorithm: str = "backend", wrong: int = 0
) -> Sent:
    """
    >>> summarize("all-reduce", 4000, 4, [1e-6, 2e-6, 3e-6]).bus_gb_s
    3.0
    """
    middle = median(seconds)
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (middle, middle, middle)
    return Sent(
        operation,
        size,
        latency_us=middle * 1e6,
        low_us=low * 1e6,
        high_us=high * 1e6,
        bus_gb_s=round(size * bus_part(operation, ranks) / middle / 1e9, 6),
        alg_gb_s=round(size / middle / 1e9, 6),
        count=size // 4 // ranks * ranks,
        wrong=wrong,
        algorithm=algorithm,
    )


def _check_sizes(sizes: Sequence[int], ranks: int) -> None:
    if sizes[0] < 4 * ranks:
        raise ConfigError(
            f"a message of {sizes[0]} bytes among {ranks} processes",
            why="it has a number of 4 bytes for each of them",
            do=f"-b {4 * ranks}",
        )
